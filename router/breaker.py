"""Circuit breakers: a worker that fails several times in a row is rested for a moment, longer each time."""

from dataclasses import dataclass

_FAILURES_TO_OPEN = 3
_FIRST_REST_S = 0.5
_LONGEST_REST_S = 15.0


@dataclass(slots=True)
class _State:
    failures: int = 0
    rest_s: float = _FIRST_REST_S
    closed_until: float = 0.0


class Breakers:
    """One breaker a worker.

    After the rest any request may try it: the first success closes it, the first failure rests it again.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def allows(self, worker: str, now: float) -> bool:
        """Whether the worker may be tried now."""
        state = self._states.get(worker)
        return state is None or now >= state.closed_until

    def succeeded(self, worker: str) -> None:
        """An answer began: forget the failures."""
        self._states.pop(worker, None)

    def failed(self, worker: str, now: float) -> None:
        """A connection or the wait for a first byte failed, or the worker said 502, 503 or 504."""
        state = self._states.setdefault(worker, _State())
        state.failures += 1
        if state.failures >= _FAILURES_TO_OPEN:
            state.closed_until = now + state.rest_s
            state.rest_s = min(_LONGEST_REST_S, 2 * state.rest_s)

    def resting(self, now: float) -> list[str]:
        """Workers that are rested now."""
        return [worker for worker, state in self._states.items() if now < state.closed_until]

    def prune(self, known: set[str]) -> None:
        """Forget workers that are not known any more."""
        for worker in set(self._states) - known:
            del self._states[worker]
