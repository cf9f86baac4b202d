"""The last decisions, each with every candidate: what /debug/decisions and /v1/decisions/{id} show."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from router.placement import Decision
from router.policy.base import Candidate, Choice, Prompt


@dataclass(slots=True)
class Receipt:
    """One attempt of one request.  It keeps no token of the prompt."""

    request_id: str
    at: float
    """Unix time, s."""
    model: str
    prompt: Prompt
    candidates: list[Candidate]
    trust: list[str]
    choice: Choice
    policy: str
    unhashed: str | None
    attempt: int
    status: int | None = None
    cached_tokens: int | None = None
    """What the engine said it took from its cache."""
    failure: str | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON-able values."""
        chosen = self.candidates[self.choice.pick]
        return {
            "request_id": self.request_id,
            "at": self.at,
            "model": self.model,
            "worker": chosen.worker,
            "dp_rank": chosen.dp_rank,
            "policy": self.policy,
            "kind": self.choice.kind,
            "reason": self.choice.reason,
            "unhashed": self.unhashed,
            "attempt": self.attempt,
            "status": self.status,
            "failure": self.failure,
            "prompt_tokens": self.prompt.tokens,
            "prompt_blocks": self.prompt.blocks,
            "block_size": self.prompt.block_size,
            "available_tokens": max(c.overlap_blocks for c in self.candidates) * self.prompt.block_size,
            "promised_tokens": chosen.overlap_blocks * self.prompt.block_size,
            "delivered_tokens": self.cached_tokens,
            "candidates": [
                {
                    "worker": candidate.worker,
                    "dp_rank": candidate.dp_rank,
                    "overlap_blocks": candidate.overlap_blocks,
                    "expected_blocks": candidate.expected_blocks,
                    "queued_tokens": candidate.queued_tokens,
                    "decode_blocks": candidate.decode_blocks,
                    "requests": candidate.running,
                    "score": score,
                    "trust": trust,
                }
                for candidate, score, trust in zip(self.candidates, self.choice.scores, self.trust, strict=True)
            ],
        }


class Receipts:
    """The newest `limit` receipts, by request id; a retried request keeps its last one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, request_id: str, model: str, decision: Decision, *, attempt: int, now: float) -> Receipt:
        """Keep a decision; the caller fills in how it ended."""
        receipt = Receipt(
            request_id,
            now,
            model,
            decision.prompt,
            decision.candidates,
            [str(target.view.sources[target.dp_rank].trust) for target in decision.targets],
            decision.choice,
            decision.policy,
            decision.tokens.why_not,
            attempt,
        )
        self._kept.pop(request_id, None)
        self._kept[request_id] = receipt
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return receipt

    def get(self, request_id: str) -> Receipt | None:
        """The receipt of a request, while it is kept."""
        return self._kept.get(request_id)

    def last(self, count: int) -> list[Receipt]:
        """The newest receipts, newest first."""
        newest = list(self._kept.values())[-max(0, count) :] if count > 0 else []
        return newest[::-1]
