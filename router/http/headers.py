"""Names of the headers that the router reads and adds, and the values that tell of a decision."""

from router.placement import Decision
from serving.http import printable

WORKER = "x-warmroute-worker"
OVERLAP_BLOCKS = "x-warmroute-overlap-blocks"
PROMPT_BLOCKS = "x-warmroute-prompt-blocks"
SCORE = "x-warmroute-score"
REASON = "x-warmroute-reason"
REQUEST_ID = "x-request-id"
SESSION = "x-session-id"
RANK = "x-data-parallel-rank"
"""Asks a worker of several ranks for one of them (vLLM's name)."""


def of_decision(decision: Decision) -> dict[str, str]:
    """Response headers for a decision."""
    return {
        WORKER: printable(decision.candidate.worker, 256),
        OVERLAP_BLOCKS: str(decision.candidate.overlap_blocks),
        PROMPT_BLOCKS: str(decision.prompt.blocks),
        SCORE: f"{decision.score:.1f}",
        REASON: printable(reason(decision), 1024),
    }


def reason(decision: Decision) -> str:
    """The policy's sentence, and why a prompt could not be hashed when it could not."""
    if decision.tokens.why_not is None:
        return decision.choice.reason
    return f"{decision.choice.reason} ({decision.tokens.why_not})"
