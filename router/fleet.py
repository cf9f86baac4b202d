"""The workers as the router may use them now: a view over the event plane's discovery, grouped by model."""

from collections.abc import Callable
from typing import NamedTuple

from kvevents.consumer import WorkerView
from router.breaker import Breakers
from router.load import Account, LoadLedger, SourceKey


class Target(NamedTuple):
    """One source that may take a prompt: its worker, its rank, and what names it in index and ledger."""

    view: WorkerView
    dp_rank: int
    handle: int
    key: SourceKey
    account: Account


_REMEMBERED_S = 0.05
"""How long a list of ready targets may be used again.

Every change that reaches the router ends it at once.
"""


class Fleet:
    """Answers who serves a model and who of them is ready; discovery owns the workers."""

    def __init__(
        self,
        ledger: LoadLedger,
        breakers: Breakers,
        clock: Callable[[], float],
    ) -> None:
        self._workers: Callable[[], dict[str, WorkerView]] = dict
        self._ledger, self._breakers, self._clock = ledger, breakers, clock
        self._drained: set[str] = set()
        self._ready_targets: dict[str, tuple[float, list[Target]]] = {}

    def follow(self, workers: Callable[[], dict[str, WorkerView]]) -> None:
        """Ask this from now on for the workers (discovery is made with our `on_change`, so it comes
        second).
        """
        self._workers = workers

    def models(self) -> list[str]:
        """Names of the models that any known worker serves, sorted."""
        return sorted({view.beat.model for view in self._workers().values()})

    def workers(self) -> dict[str, WorkerView]:
        """Every worker that is known, ready or not."""
        return self._workers()

    def of_model(self, model: str) -> list[WorkerView]:
        """Every known worker of a model, ready or not."""
        return [view for view in self._workers().values() if view.beat.model == model]

    def why_not(self, view: WorkerView) -> str | None:
        """Why a worker takes no new prompt now; None when it does."""
        if view.beat.worker in self._drained:
            return "drained by an operator"
        if not view.alive:
            return "silent"
        if not view.ready:
            return view.beat.state
        if not self._breakers.allows(view.beat.worker, self._clock()):
            return "failing, rested for a moment"
        return None

    def ready(self, model: str) -> list[WorkerView]:
        """Workers of a model that take new prompts."""
        return [view for view in self.of_model(model) if self.why_not(view) is None]

    def ready_targets(self, model: str) -> list[Target]:
        """Every source of the ready workers of a model; do not change the list."""
        now = self._clock()
        until, targets = self._ready_targets.get(model, (0.0, []))
        if now >= until:
            targets = self.targets(self.ready(model))
            self._ready_targets[model] = (now + _REMEMBERED_S, targets)
        return targets

    def targets(self, views: list[WorkerView]) -> list[Target]:
        """Every source of the given workers."""
        found = []
        for view in views:
            for entry in view.beat.sources:
                source = view.sources.get(entry.dp_rank)
                if source is None:
                    continue
                rank = entry.dp_rank
                key = SourceKey(view.beat.worker, rank, entry.epoch)
                found.append(Target(view, rank, source.handle, key, self._ledger.account(key)))
        return found

    def drain(self, worker: str) -> bool:
        """Give a worker no new prompts until `undrain`.  Returns whether it is known."""
        self._drained.add(worker)
        self._ready_targets.clear()
        return worker in self._workers()

    def undrain(self, worker: str) -> bool:
        """Let a worker take prompts again.  Returns whether it is known."""
        self._drained.discard(worker)
        self._ready_targets.clear()
        return worker in self._workers()

    def on_change(self, view: WorkerView) -> None:
        """Take a heartbeat's load into the ledger; called by discovery."""
        self._ready_targets.clear()
        now = self._clock()
        for beat in view.beat.sources:
            key = SourceKey(view.beat.worker, beat.dp_rank, beat.epoch)
            self._ledger.account(key).heard(
                prefill_tokens=beat.load.prefill_tokens,
                decode_blocks=beat.load.decode_blocks,
                running=beat.load.running + beat.load.waiting,
                now=now,
            )

    def failed(self, worker: str) -> None:
        """A worker failed a request before its first byte."""
        self._breakers.failed(worker, self._clock())
        self._ready_targets.clear()

    def answered(self, worker: str) -> None:
        """A worker began an answer."""
        self._breakers.succeeded(worker)

    def tidy(self) -> None:
        """Forget accounts and breakers of workers that are gone."""
        self._ready_targets.clear()
        views = self._workers()
        self._ledger.prune({target.key for target in self.targets(list(views.values()))})
        self._breakers.prune(set(views))
        self._drained &= set(views)
