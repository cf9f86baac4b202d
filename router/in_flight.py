"""Counts the requests in the router, and waits for the last one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """One owner: the event loop's thread."""

    def __init__(self) -> None:
        self.count = 0
        self.cancelled = 0
        """Requests that were cancelled here: their clients had gone."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while it is here."""
        self.count += 1
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until none is left, `timeout_s` at most.  Returns whether none is left."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
