"""Policy `random`: any worker, with equal chances."""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt


class Uniform:
    """The control group of every comparison."""

    name = "random"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """A uniformly random candidate; all scores are equal."""
        return Choice(
            rng.randrange(len(candidates)), (0.0,) * len(candidates), "spread", f"random of {len(candidates)}"
        )
