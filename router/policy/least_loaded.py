"""Policy `least-loaded`: the least promised prefill and decode work, whatever is cached."""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt, lowest


class LeastLoaded:
    """Scores are tokens: prefill queued plus context pinned by running requests."""

    name = "least-loaded"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The candidate with the least work; ties at random."""
        scores = tuple(float(c.queued_tokens + c.decode_blocks * prompt.block_size) for c in candidates)
        pick, ties = lowest(scores, rng)
        kind = "tie" if ties > 1 else "load"
        return Choice(pick, scores, kind, f"{scores[pick]:.0f} tokens of work promised, the least of {len(scores)}")
