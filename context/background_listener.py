"""Keeps a slow listener off the engine's thread: a bounded queue and a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from context.dynamo_helper import KVEventListener

logger = logging.getLogger(__name__)

_Event = tuple[str, dict[str, Any]]


class BackgroundListener:
    """A `KVEventListener` that only queues; `listener` is called on another thread, in order.

    When the queue is full events are dropped and counted in `dropped`: the listener's view is then incomplete until
    the next `cleared`, and whoever reads it must know.  `kvevents.EventPublisher` needs none of this, it never blocks.

    Args:
        listener: the slow one; what it raises is counted in `failures` and logged.
        max_events: events that may wait.
    """

    def __init__(self, listener: KVEventListener, max_events: int = 65536) -> None:
        if max_events < 1:
            raise ValueError(f"max_events is {max_events}; at least 1 event must be able to wait")
        self._listener = listener
        self._queue: queue.Queue[_Event | None] = queue.Queue(max_events)
        self._thread = threading.Thread(target=self._run, name="kv-event-listener", daemon=True)
        self.dropped = 0
        self.failures = 0
        self._thread.start()

    def __call__(self, kind: str, payload: dict[str, Any]) -> None:
        """Queue one event; never blocks."""
        try:
            self._queue.put_nowait((kind, payload))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> bool:
        """Hand over what waits, then end the thread; False if it was not done in time."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._listener(*event)
            except Exception:
                self.failures += 1
                logger.exception("KV-event listener failed on %r", event[0])
