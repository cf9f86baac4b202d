"""What every policy sees and says: prompt, candidates, choice."""

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """One prompt to place.

    `tokens` is an estimate when `hashed` is False (the prompt could not be tokenised).
    """

    tokens: int
    blocks: int
    """Complete blocks, the most that can match."""
    block_size: int
    hashed: bool = True
    turn: int = 0
    """How many prompts of this model were placed before; what makes round robin a pure function."""
    session: str | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One source (worker, rank) that may take the prompt, as the router sees it now.

    Tokens and blocks are whole numbers.
    """

    worker: str
    dp_rank: int
    overlap_blocks: int = 0
    """Leading blocks of the prompt in this source's cache, by its events."""
    expected_blocks: int = 0
    """The same, or more when a prompt with this prefix was just sent there and its events are still to
    come.
    """
    queued_tokens: int = 0
    """Prefill promised to the source and not yet done, by any router."""
    decode_blocks: int = 0
    """Distinct blocks pinned by requests in flight."""
    decoding_blocks: int = 0
    """Blocks of context over the requests that have begun to answer; shared ones count for each."""
    running: int = 0
    recent_tokens: float = 0.0
    """Prefill tokens given to the source lately, decayed (`router.load`)."""
    capacity_blocks: int = 0
    """Blocks of the source's pool; 0 = unknown."""

    def missing_tokens(self, prompt: Prompt) -> int:
        """Prompt tokens that this source still has to compute.

        At least one: the engine needs a last token's logits.
        """
        held = self.expected_blocks if self.expected_blocks > self.overlap_blocks else self.overlap_blocks
        missing = prompt.tokens - held * prompt.block_size
        return missing if missing > 1 else 1


class Choice(NamedTuple):
    """The decision: `pick` indexes the candidates, each one's score (lower is better), and why, for people
    and for metrics.
    """

    pick: int
    scores: tuple[float, ...]
    kind: str
    """cache, load, tie, replicate, only, spread or order: a metric label."""
    reason: str


class Policy(Protocol):
    """Chooses a candidate.  `decide` is pure: it keeps nothing, and takes its randomness from `rng`."""

    name: str

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Choose among at least one candidate.

        Must not raise for any values within the types' documented ranges.
        """
        ...


def lowest(scores: Sequence[float], rng: random.Random, *, within: float = 0.0) -> tuple[int, int]:
    """(index, number of ties): a uniformly random one of the lowest scores, those up to `within` above it
    counting as equal.
    """
    bound = min(scores) + within
    tied = [i for i, score in enumerate(scores) if score <= bound]
    return (tied[0] if len(tied) == 1 else rng.choice(tied)), len(tied)
