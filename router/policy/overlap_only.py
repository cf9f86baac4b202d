"""Policy `overlap-only`: the longest cached prefix, whatever the load; a baseline that overloads one worker
on shared prefixes.
"""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt, lowest


class OverlapOnly:
    """Scores are blocks of the prompt that a candidate does not hold."""

    name = "overlap-only"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The candidate with the longest prefix; ties at random."""
        scores = tuple(float(prompt.blocks - max(c.overlap_blocks, c.expected_blocks)) for c in candidates)
        pick, ties = lowest(scores, rng)
        held = prompt.blocks - int(scores[pick])
        kind = "cache" if held and ties == 1 else "tie"
        return Choice(pick, scores, kind, f"holds {held} of {prompt.blocks} blocks, the most of {len(scores)}")
