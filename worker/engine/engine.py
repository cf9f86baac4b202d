"""The engine's thread: receive, step, deliver, over and over; sleeps when there is nothing to do."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from worker.engine.core import EngineCore
from worker.engine.inbox import Inbox, Received
from worker.engine.request import GenerationRequest
from worker.engine.stats import LoadSnapshot
from worker.engine.stream import Delivery, OutputStream

log = logging.getLogger(__name__)


class Engine:
    """Runs an `EngineCore` on a thread of its own and talks with one event loop.

    `submit` and what it returns belong to the event loop; everything in the core belongs to the thread.

    Args:
        max_waiting: requests that may wait for admission; more are refused.
        debug: check the context's integrity whenever the engine runs out of work.
    """

    def __init__(
        self, core: EngineCore, loop: asyncio.AbstractEventLoop, *, max_waiting: int = 1024, debug: bool = False
    ) -> None:
        self.core = core
        self._inbox = Inbox(max_waiting)
        self._delivery = Delivery(loop)
        self._debug = debug
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._turned_at = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End every request and the thread; False if the thread did not end in time.  Blocks."""
        self._inbox.close()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_for_s(self) -> float:
        """Seconds since the loop turned last, 0 when it sleeps for lack of work."""
        return time.monotonic() - self._turned_at if self.core.has_work else 0.0

    @property
    def load(self) -> LoadSnapshot:
        """The load after the last step."""
        return self.core.load

    @property
    def waiting(self) -> int:
        """Requests that wait for admission, those that the thread has not seen yet included."""
        return self._inbox.waiting

    @property
    def undelivered(self) -> int:
        """Outputs that found no event loop."""
        return self._delivery.undelivered

    def submit(self, requests: Sequence[GenerationRequest]) -> OutputStream:
        """Start a generation for each request, all or none; the choices of the stream are in their order.

        Raises QueueFullError or EngineStoppedError.  The caller closes the stream, which cancels what still runs.
        """
        numbers: list[int] = []
        stream = OutputStream(len(requests), lambda choices: self._inbox.abort([numbers[choice] for choice in choices]))
        generations = [
            self.core.prepare(request, self._delivery.sink(stream, choice)) for choice, request in enumerate(requests)
        ]
        numbers += [generation.number for generation in generations]
        self._inbox.submit(generations)
        return stream

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            received = self._receive()
            if received.is_closed:
                break
            self._turn(received)
        self._end()

    def _receive(self) -> Received:
        idle = not self.core.has_work
        if idle and self._debug:
            self._check_integrity()
        received = self._inbox.receive(wait=idle)
        self._turned_at = time.monotonic()
        return received

    def _turn(self, received: Received) -> None:
        try:
            for generation in received.generations:
                self.core.add(generation)
            if received.aborted:
                self.core.abort(received.aborted)
                self._settle()
            self.core.step()
        except Exception as error:  # the bookkeeping is in an unknown state: give up its requests, serve on
            log.exception("engine.reset")
            self.core.reset(f"the engine was reset: {type(error).__name__}")
        self._settle()
        self._delivery.flush()

    def _settle(self) -> None:
        self._inbox.settle(self.core.scheduler.waiting_count)

    def _check_integrity(self) -> None:
        try:
            self.core.context.check_integrity()
        except AssertionError:
            self.core.counters.integrity_failures += 1
            log.exception("engine.integrity")

    def _end(self) -> None:
        received = self._inbox.receive(wait=False)
        for generation in received.generations:
            self.core.add(generation)
        self.core.abort([generation.number for generation in self.core.scheduler.everything()])
        self._delivery.flush()
