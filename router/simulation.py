"""Runs a policy over a trace of prompts against simulated workers: hit ratio, balance, time to first token.

The model is small on purpose.  A worker holds an LRU of `capacity` blocks and prefills its prompts one
after the other at `prefill_tokens_per_s`; a prompt's hit is the leading run of its blocks resident on the
chosen worker when it is placed, and its whole chain is resident from then on (touched from the tail, so
that parents are newest).  Decoding takes `decode_s_per_token` and pins the prompt's blocks.  Events are
instant and generated tokens are not cached.  The policy is the live router's own.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.load import Account, LoadLedger, SourceKey
from router.policy.base import Candidate, Policy, Prompt


class Arrival(NamedTuple):
    """One prompt of a trace: seconds, tokens, the names of its blocks in order (the last may be partial)."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]


class Outcome(NamedTuple):
    """What one policy made of a trace."""

    policy: str
    workers: int
    capacity: int
    requests: int
    token_hit: float
    """Tokens found in the chosen worker's cache over all prompt tokens."""
    imbalance: float
    """Largest over mean prefill work of the workers, in blocks not hit."""
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(slots=True)
class _Worker:
    name: str
    capacity: int
    blocks: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    free_at: float = 0.0
    work: int = 0
    running: deque[tuple[float, int]] = field(default_factory=deque)
    pinned: int = 0
    account: Account = field(default_factory=Account)

    def overlap(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are resident."""
        for depth, block in enumerate(blocks):
            if block not in self.blocks:
                return depth
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Make a chain resident and newest, its root last; evict the oldest."""
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    def release(self, now: float) -> None:
        """Forget requests that have ended."""
        while self.running and self.running[0][0] <= now:
            self.pinned -= self.running.popleft()[1]


class Simulation:
    """One fleet; `run` it over one trace."""

    def __init__(
        self,
        policy: Policy,
        *,
        workers: int,
        capacity: int,
        block_tokens: int = 512,
        prefill_tokens_per_s: float = 10_000.0,
        decode_s_per_token: float = 0.02,
        seed: int = 1,
    ) -> None:
        self._policy, self._capacity, self._block = policy, capacity, block_tokens
        self._speed, self._decode_s = prefill_tokens_per_s, decode_s_per_token
        self._rng = random.Random(seed)
        self._now = 0.0
        self._ledger = LoadLedger(lambda: self._now)
        self.workers = [_Worker(f"w{n}", capacity) for n in range(workers)]
        for worker in self.workers:
            worker.account = self._ledger.account(SourceKey(worker.name, 0, 1))

    def run(self, trace: Iterable[Arrival]) -> Outcome:
        """Place every prompt in the order given.  Raises ZeroDivisionError for an empty trace."""
        tokens, hit_tokens, waits = 0, 0, []
        for turn, arrival in enumerate(trace):
            self._now = arrival.at_s
            prompt = Prompt(arrival.input_tokens, len(arrival.blocks), self._block, True, turn)
            candidates = [self._candidate(worker, arrival) for worker in self.workers]
            pick = self._policy.decide(prompt, candidates, self._rng).pick
            hit = candidates[pick].overlap_blocks
            waits.append(self._serve(self.workers[pick], arrival, hit))
            tokens += arrival.input_tokens
            hit_tokens += min(hit * self._block, arrival.input_tokens)
        waits.sort()
        work = [worker.work for worker in self.workers]
        return Outcome(
            policy=self._policy.name,
            workers=len(self.workers),
            capacity=self._capacity,
            requests=len(waits),
            token_hit=hit_tokens / tokens,
            imbalance=max(work) * len(work) / max(1, sum(work)),
            ttft_p50_ms=waits[len(waits) // 2] * 1e3,
            ttft_p99_ms=waits[int(len(waits) * 0.99)] * 1e3,
        )

    def _candidate(self, worker: _Worker, arrival: Arrival) -> Candidate:
        worker.release(self._now)
        overlap = worker.overlap(arrival.blocks)
        return Candidate(
            worker=worker.name,
            dp_rank=0,
            overlap_blocks=overlap,
            expected_blocks=overlap,
            queued_tokens=int(max(0.0, worker.free_at - self._now) * self._speed),
            decode_blocks=worker.pinned,
            decoding_blocks=worker.pinned,
            running=len(worker.running),
            recent_tokens=worker.account.recent_tokens(self._now),
        )

    def _serve(self, worker: _Worker, arrival: Arrival, hit: int) -> float:
        """Queue the prompt on a worker.  Returns its time to first token, s."""
        missing = max(1, arrival.input_tokens - hit * self._block)
        key = SourceKey(worker.name, 0, 1)
        self._ledger.reserve(key, prefill_tokens=missing, decode_blocks=0).end()
        worker.free_at = max(self._now, worker.free_at) + missing / self._speed
        worker.work += len(arrival.blocks) - hit
        worker.touch(arrival.blocks)
        ends = max(worker.free_at + arrival.output_tokens * self._decode_s, self._last_end(worker))
        worker.running.append((ends, len(arrival.blocks)))
        worker.pinned += len(arrival.blocks)
        return worker.free_at - self._now

    def _last_end(self, worker: _Worker) -> float:
        """Requests leave in the order of arrival: a small simplification that keeps the queue a queue."""
        return worker.running[-1][0] if worker.running else 0.0
