"""The one queue into the engine: new generations and cancellations, from any thread, bounded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from worker.engine.generation import Generation
from worker.engine.request import EngineStoppedError, QueueFullError


class Received(NamedTuple):
    """What came in since the engine looked last."""

    generations: list[Generation]
    aborted: list[int]
    is_closed: bool


class Inbox:
    """Holds what the engine has not seen yet.

    `limit` bounds the generations that are submitted and not yet in the batch, those that wait inside the engine
    included; a cancellation is never refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition()
        self._generations: list[Generation] = []
        self._aborted: list[int] = []
        self._inside = 0
        """Generations that wait inside the engine, as it said last."""
        self._closed = False

    @property
    def waiting(self) -> int:
        """Generations that are submitted and, as far as the engine has said, not yet in the batch."""
        with self._condition:
            return len(self._generations) + self._inside

    def submit(self, generations: Sequence[Generation]) -> None:
        """Hand over several generations, all or none.

        Raises QueueFullError when too many wait, EngineStoppedError after `close`.
        """
        with self._condition:
            if self._closed:
                raise EngineStoppedError("the engine is stopped")
            waiting = len(self._generations) + self._inside
            if waiting + len(generations) > self._limit:
                raise QueueFullError(waiting, self._limit)
            self._generations += generations
            self._condition.notify()

    def abort(self, numbers: Sequence[int]) -> None:
        """Cancel generations; numbers that have ended are ignored by the engine."""
        if not numbers:
            return
        with self._condition:
            self._aborted += numbers
            self._condition.notify()

    def close(self) -> None:
        """Take nothing any more and let `receive` say so."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def receive(self, *, wait: bool) -> Received:
        """Everything that came in; `wait` sleeps until there is something."""
        with self._condition:
            if wait:
                self._condition.wait_for(lambda: self._generations or self._aborted or self._closed)
            received = Received(self._generations, self._aborted, self._closed)
            self._generations, self._aborted = [], []
            self._inside += len(received.generations)
            return received

    def settle(self, inside: int) -> None:
        """The engine says how many of those that it received still wait."""
        with self._condition:
            self._inside = inside
