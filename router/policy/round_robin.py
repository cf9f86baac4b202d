"""Policy `round-robin`: workers in turn, by name, whatever they hold."""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt


class RoundRobin:
    """Scores are the distance to a candidate's turn."""

    name = "round-robin"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The candidate whose turn it is in the order of names and ranks."""
        order = sorted(range(len(candidates)), key=lambda i: (candidates[i].worker, candidates[i].dp_rank))
        start = prompt.turn % len(order)
        scores = [0.0] * len(order)
        for distance in range(len(order)):
            scores[order[(start + distance) % len(order)]] = float(distance)
        return Choice(order[start], tuple(scores), "order", f"turn {start + 1} of {len(order)}")
