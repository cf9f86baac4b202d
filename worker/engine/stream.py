"""Carries outputs from the engine's thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from worker.engine.request import Output

log = logging.getLogger(__name__)


class OutputStream:
    """The outputs of the choices of one client request, in the event loop that made it.

    What arrives while nobody reads is merged per choice, so a slow reader costs at most its answer's own size.
    """

    def __init__(self, choices: int, on_close: Callable[[list[int]], None]) -> None:
        self._pending: dict[int, Output] = {}
        self._open = set(range(choices))
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended and was read."""
        return not self._open and not self._pending

    def put(self, choice: int, output: Output) -> None:
        """Add an output; in the stream's event loop."""
        if choice in self._pending:
            self._pending[choice].extend(output)
        else:
            self._pending[choice] = output
        if output.finish is not None:
            self._open.discard(choice)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[tuple[int, Output]]:
        """All that came since the last call, at least one, by choice.  Not to be called when finished."""
        while not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, {}
        return sorted(pending.items(), key=lambda item: item[0])

    def close(self) -> None:
        """Cancel the choices that have not ended."""
        self._on_close(sorted(self._open))
        self._open.clear()


class Delivery:
    """Collects a step's outputs on the engine's thread and hands them to the event loop in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: list[tuple[OutputStream, int, Output]] = []
        self.undelivered = 0
        """Outputs that came after their event loop had ended."""

    def sink(self, stream: OutputStream, choice: int) -> Callable[[Output], None]:
        """Where the outputs of one choice go, until `flush`."""

        def collect(output: Output) -> None:
            self._batch.append((stream, choice, output))

        return collect

    def flush(self) -> None:
        """Wake the event loop once for everything collected."""
        if not self._batch:
            return
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_hand_over, batch)
        except RuntimeError:
            self.undelivered += len(batch)
            log.warning("engine.undelivered", extra={"outputs": len(batch)})


def _hand_over(batch: Sequence[tuple[OutputStream, int, Output]]) -> None:
    for stream, choice, output in batch:
        stream.put(choice, output)
