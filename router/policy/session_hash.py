"""Policy `session-hash`: the same session (header x-session-id) always to the same worker, by rendezvous
hashing.
"""

import hashlib
import random
from collections.abc import Sequence

from router.policy.base import Candidate, Choice, Prompt


class SessionHash:
    """When a worker leaves, only its own sessions move.  Prompts without a session go to a random worker."""

    name = "session-hash"

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], rng: random.Random) -> Choice:
        """The candidate whose name hashes highest together with the session."""
        if prompt.session is None:
            return Choice(
                rng.randrange(len(candidates)),
                (0.0,) * len(candidates),
                "spread",
                "no session header: random",
            )
        scores = tuple(_distance(prompt.session, c) for c in candidates)
        pick = min(range(len(scores)), key=scores.__getitem__)
        return Choice(pick, scores, "order", "the session's own worker by rendezvous hash")


def _distance(session: str, candidate: Candidate) -> float:
    """In [0, 1); the fields carry their lengths so that no two pairs are spelt alike."""
    text = f"{len(session)}:{session}{len(candidate.worker)}:{candidate.worker}{candidate.dp_rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little") / 2**48
