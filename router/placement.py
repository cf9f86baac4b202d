"""Where a prompt goes: gather the candidates, let the policy decide, book the promise."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvevents.consumer import WorkerView
from router.errors import no_worker, unknown_worker
from router.fleet import Fleet, Target
from router.index.catalog import IndexCatalog, IndexKey
from router.load import LoadLedger, Reservation
from router.policy.base import Candidate, Choice, Policy, Prompt
from router.predicted import PredictedPrefixes
from router.prompt import PromptTokens


@dataclass(slots=True, frozen=True)
class Decision:
    """A choice with all that went into it; nothing is booked yet."""

    prompt: Prompt
    tokens: PromptTokens
    targets: list[Target]
    candidates: list[Candidate]
    choice: Choice
    policy: str
    forced: bool

    @property
    def target(self) -> Target:
        """The chosen source."""
        return self.targets[self.choice.pick]

    @property
    def candidate(self) -> Candidate:
        """What was known of the chosen source."""
        return self.candidates[self.choice.pick]

    @property
    def score(self) -> float:
        """The chosen source's score; lower is better."""
        return self.choice.scores[self.choice.pick]

    @property
    def best_overlap(self) -> int:
        """The longest prefix that any candidate holds, in blocks."""
        return max(candidate.overlap_blocks for candidate in self.candidates)


class Placer:
    """Owns no state but the turn counter and the random generator; index, ledger and fleet are asked.

    Event loop's thread only.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        catalog: IndexCatalog,
        predicted: PredictedPrefixes,
        ledger: LoadLedger,
        policy: Policy,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._catalog, self._predicted = fleet, catalog, predicted
        self._ledger, self._policy, self._rng, self._clock = ledger, policy, rng, clock
        self._turns: dict[str, int] = {}

    @property
    def policy_name(self) -> str:
        """The policy in use."""
        return self._policy.name

    def decide(
        self,
        model: str,
        tokens: PromptTokens,
        *,
        session: str | None = None,
        without: Collection[str] = (),
        force: str | None = None,
    ) -> Decision:
        """Choose a source for a prompt; books nothing.  `without` names workers that failed it already.

        Raises OpenAIError: 404 for an unknown forced worker, 503 when no worker is ready.
        """
        targets = self._fleet.ready_targets(model)
        if without:
            targets = [target for target in targets if target.key.worker not in without]
        if force is not None:
            ready = {target.key.worker for target in targets}
            targets = [target for target in targets if target.key.worker == force]
            if not targets:
                raise unknown_worker(force, ready)
        if not targets:
            raise no_worker(self._why_none(model, without), 1)
        prompts, candidates = self._gather(model, tokens, targets, session)
        prompt = prompts[0]
        choice = self._policy.decide(prompt, candidates, self._rng)
        if force is not None:
            choice = Choice(choice.pick, choice.scores, "forced", "forced by header x-warmroute-worker")
        return Decision(prompts[choice.pick], tokens, targets, candidates, choice, self._policy.name, force is not None)

    def book(self, model: str, decision: Decision) -> Reservation:
        """Promise the decided work; the caller ends the reservation whatever happens."""
        target, prompt, tokens = decision.target, decision.prompt, decision.tokens
        self._turns[model] = self._turns.get(model, 0) + 1
        if tokens.ids is not None:
            key = IndexKey(model, prompt.block_size)
            self._predicted.add(key, target.handle, tokens.hashes(prompt.block_size), self._clock())
        missing, size = decision.candidate.missing_tokens(prompt), prompt.block_size
        return self._ledger.reserve(
            target.key,
            prefill_tokens=missing,
            decode_blocks=-(-missing // size),
            context_blocks=-(-prompt.tokens // size),
        )

    def _gather(
        self, model: str, tokens: PromptTokens, targets: list[Target], session: str | None
    ) -> tuple[list[Prompt], list[Candidate]]:
        """One prompt and one candidate a target: workers of one model may differ in block size."""
        now, turn, count, hashed = (
            self._clock(),
            self._turns.get(model, 0),
            tokens.count,
            tokens.ids is not None,
        )
        by_size: dict[int, tuple[Prompt, dict[int, int], dict[int, int]]] = {}
        prompts, candidates = [], []
        for target in targets:
            beat = target.view.beat
            size = beat.block_size
            if size not in by_size:
                held, expected = self._overlaps(IndexKey(model, size), tokens, now)
                by_size[size] = Prompt(count, count // size, size, hashed, turn, session), held, expected
            prompt, held, expected = by_size[size]
            account = target.account
            depth = held.get(target.handle, 0)
            candidates.append(
                Candidate(
                    target.key.worker,
                    target.dp_rank,
                    depth,
                    max(depth, expected.get(target.handle, 0)) if expected else depth,
                    account.queued_tokens,
                    account.pinned_blocks,
                    account.decoding_blocks,
                    account.running,
                    account.recent_tokens(now),
                    beat.capacity_blocks,
                )
            )
            prompts.append(prompt)
        return prompts, candidates

    def _overlaps(self, key: IndexKey, tokens: PromptTokens, now: float) -> tuple[dict[int, int], dict[int, int]]:
        """(held, expected): handle -> leading blocks, by the exact index and by what was just placed."""
        hashes = tokens.hashes(key.block_size)
        if not hashes.shape[0]:
            return {}, {}
        return self._catalog.match(key, hashes).as_dict(), self._predicted.match(key, hashes, now)

    def _why_none(self, model: str, without: Collection[str]) -> str:
        """All workers of a model and why each is out."""
        told = [f"{view.beat.worker} {self._why(view, without)}" for view in self._fleet.of_model(model)]
        return "; ".join(told) if told else f"no worker serves {model}"

    def _why(self, view: WorkerView, without: Collection[str]) -> str:
        if view.beat.worker in without:
            return "failed this request"
        return f"is {self._fleet.why_not(view) or 'without a source'}"
