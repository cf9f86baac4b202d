"""Policy `warm` (default): the least expected time to the first token, counted in prefill tokens.

score = what is left to prefill after the hit
      + impatience x (prefill promised and not yet done + interference of decoding)
      + a small fair-share term

Everything is in one unit, the time to prefill one token.  Waiting delays this prompt alone; computing also
delays every prompt that queues behind it and displaces cached blocks, which matters as soon as there is a
queue.  So *impatience* is 0.7 while most workers are idle (a hot prefix comes to a second worker when
waiting there costs clearly more than computing it again) and sinks as more of them have work queued: under
load a hit is worth several times its own tokens.
"""

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt, lowest

DECODE_SHARE = 0.02
"""Prefill tokens that one token of pinned context costs: decode steps interleave with the prefill and read
that context.
"""
OVERFLOW_COST = 4.0
"""Per token that the pool cannot hold beside what runs there: the prompt waits for others to finish, or
pushes them out.
"""
FAIR_SHARE = 0.35
"""Most of the prompt that a worker with more than its share of recent prefill is charged on top.

Without it one worker takes every prompt while all are idle between prompts, for the sake of a short common
prefix.
"""
FAIR_HISTORY = 2
"""Prompts of history a worker that count as little: one prompt alone says nothing about shares."""
SURPLUS = 0.2
"""From this surplus over the mean on, with four times that history, the charge grows up to the whole
prompt, so that the prefixes that make a worker hot come to others as well.
"""
MOST_IMPATIENCE = 0.7
"""Below 1 even on an idle fleet: of two equally early answers, the one that computes less is better for all
who come after.
"""
LEAST_IMPATIENCE = 0.05
"""Impatience when half of the other workers or more have work queued."""


class Warm:
    """Stateless; see the module's docstring for the cost."""

    name = "warm"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The least expected time; scores within half a block of the least count as equal and are drawn at
        random.
        """
        count, recent, queued = len(candidates), 0.0, 0
        for candidate in candidates:
            recent += candidate.recent_tokens
            queued += candidate.queued_tokens > 0
        others_busy = max(0, queued - 1) / max(1, count - 1)
        impatience = max(LEAST_IMPATIENCE, MOST_IMPATIENCE * (1 - 2 * others_busy))
        scores = tuple([_cost(prompt, candidate, recent / count, impatience) for candidate in candidates])
        pick, ties = lowest(scores, rng, within=prompt.block_size / 2)
        return _explain(prompt, candidates, scores, pick, ties)


def _cost(prompt: Prompt, candidate: Candidate, mean_recent: float, impatience: float) -> float:
    """Expected time to first token on a candidate, in prefill tokens."""
    pinned = candidate.decode_blocks * prompt.block_size
    decoding = candidate.decoding_blocks * prompt.block_size
    waiting = candidate.queued_tokens + DECODE_SHARE * decoding
    cost = candidate.missing_tokens(prompt) + impatience * waiting
    if candidate.capacity_blocks:
        room = candidate.capacity_blocks * prompt.block_size
        if pinned + prompt.tokens > room:
            cost += OVERFLOW_COST * (pinned + prompt.tokens - room)
    return cost + _fair_share(prompt, candidate.recent_tokens - mean_recent, mean_recent)


def _fair_share(prompt: Prompt, excess: float, mean_recent: float) -> float:
    """Charge for prefill taken lately above the mean, in prefill tokens; 0 for a worker below it."""
    if excess <= 0:
        return 0.0
    history = FAIR_HISTORY * prompt.tokens
    charge = FAIR_SHARE * min(1.0, excess / (mean_recent + history))
    surplus = excess / (mean_recent + 4 * history) - SURPLUS
    if surplus > 0:
        charge += min(1.0, 5 * surplus)
    return charge * prompt.tokens


def _explain(
    prompt: Prompt, candidates: Sequence[Candidate], scores: tuple[float, ...], pick: int, ties: int
) -> Choice:
    """The sentence for people and the kind for metrics."""
    if len(candidates) == 1:
        return Choice(pick, scores, "only", "the only worker that can take it")
    chosen = candidates[pick]
    deepest = max(candidates, key=lambda c: max(c.overlap_blocks, c.expected_blocks))
    most = max(deepest.overlap_blocks, deepest.expected_blocks)
    held = max(chosen.overlap_blocks, chosen.expected_blocks)
    told = f"holds {chosen.overlap_blocks} of {prompt.blocks} blocks"
    if held > chosen.overlap_blocks:
        told += f", {held} expected from a prompt just sent there"
    if not prompt.hashed:
        return Choice(pick, scores, "load", "by load alone: the prompt could not be hashed")
    if most > held:
        wait = scores[candidates.index(deepest)] - deepest.missing_tokens(prompt)
        spare = chosen.missing_tokens(prompt) - deepest.missing_tokens(prompt)
        return Choice(
            pick,
            scores,
            "replicate",
            f"{told}; {deepest.worker} holds {most}, but waiting there costs {wait:.0f} tokens of time"
            f" and computing them again {spare}",
        )
    if ties > 1:
        return Choice(pick, scores, "tie", f"{told}; drawn among {ties} equal workers")
    if held:
        return Choice(pick, scores, "cache", f"{told}; expected time {scores[pick]:.0f} tokens, the least")
    return Choice(pick, scores, "load", f"nothing cached anywhere; expected time {scores[pick]:.0f} tokens, the least")
