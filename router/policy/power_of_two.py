"""Policy `power-of-two`: the less loaded of two random workers."""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt, lowest


class PowerOfTwo:
    """Nearly as even as least-loaded, and without herding when load figures are late."""

    name = "power-of-two"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """Two candidates at random, then the one with less work."""
        scores = tuple(float(c.queued_tokens + c.decode_blocks * prompt.block_size) for c in candidates)
        drawn = rng.sample(range(len(candidates)), min(2, len(candidates)))
        at, ties = lowest([scores[i] for i in drawn], rng)
        return Choice(drawn[at], scores, "tie" if ties > 1 else "load", "the less loaded of two drawn at random")
