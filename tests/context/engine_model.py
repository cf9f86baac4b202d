"""A minimal engine over the real context; its "KV cache" holds in each slot the identity of the prefix that ends there.

So after every forward it can be checked that each row's blocks hold exactly that row's own history: a wrong match, a
shared block overwritten, or a block matched before it was written all show as a wrong identity.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from context import (
    ContextOverflowError,
    DynamicInferenceContext,
    DynamicInferenceRequest,
    InferenceConfig,
    SamplingParams,
    TransformerConfig,
)

MODEL = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
BLOCK_SIZE = 4


def build_context(*, blocks: int, paused_blocks: int = 0, **settings: Any) -> DynamicInferenceContext:
    """A context with `blocks` usable blocks of 4 tokens."""
    block_bytes = 2 * BLOCK_SIZE * 8 * 4
    return DynamicInferenceContext(
        MODEL,
        InferenceConfig(
            max_sequence_length=4 * blocks,
            buffer_size_gb=((blocks + 1) * block_bytes + 1) / 1024**3,
            paused_buffer_size_gb=(paused_blocks * block_bytes + 1) / 1024**3,
            block_size_tokens=BLOCK_SIZE,
            **{"max_requests": 4, "max_tokens": 64, "enable_prefix_caching": True} | settings,
        ),
    )


def prefix_identity(tokens: list[int]) -> int:
    """Names a token together with everything before it."""
    return hash(tuple(tokens))


def next_token(history: list[int]) -> int:
    """What the "model" samples after a history; the same under any schedule."""
    return (sum(history) * 7 + len(history)) % 5


@dataclass
class Running:
    """A request as its user sees it."""

    request_id: int
    prompt: list[int]
    generate: int
    generated: list[int] = field(default_factory=list)

    @property
    def history(self) -> list[int]:
        return self.prompt + self.generated

    def expected(self) -> list[int]:
        """The answer of a one-request-at-a-time engine."""
        history = list(self.prompt)
        for _ in range(self.generate):
            history.append(next_token(history))
        return history[len(self.prompt) :]


class EngineModel:
    """Admits, runs, fails, aborts and resets; asserts after everything it does."""

    def __init__(self, context: DynamicInferenceContext) -> None:
        self.context = context
        self.slots: dict[tuple[int, int], int] = {}
        self.waiting: deque[Running] = deque()
        self.running: dict[int, Running] = {}
        self.requests: dict[int, DynamicInferenceRequest] = {}
        self.finished: dict[int, Running] = {}
        self.announced: set[int] = set()
        self.skipped_tokens = 0
        context.dynamo_helper.add_kv_event_listener(self.hear)

    def hear(self, kind: str, payload: dict[str, Any]) -> None:
        """Follow the stream as a consumer would; nothing is announced twice, removed unknown, or orphaned."""
        if kind == "cleared":
            self.announced.clear()
            return
        hashes = payload["block_hashes"]
        if kind == "removed":
            assert set(hashes) <= self.announced, "a block was removed that was not announced"
            self.announced -= set(hashes)
            return
        assert payload["parent_hash"] is None or payload["parent_hash"] in self.announced, "orphan announced"
        assert not set(hashes) & self.announced, "announced twice"
        assert len(payload["token_ids"]) == sum(payload["num_block_tokens"]) == BLOCK_SIZE * len(hashes)
        self.announced |= set(hashes)

    def submit(self, request_id: int, prompt: list[int], generate: int) -> None:
        self.waiting.append(Running(request_id, prompt, generate))

    def request_for(self, job: Running) -> DynamicInferenceRequest:
        if job.request_id not in self.requests:
            self.requests[job.request_id] = DynamicInferenceRequest(
                job.request_id,
                torch.tensor(job.history),
                SamplingParams(num_tokens_to_generate=job.generate - len(job.generated)),
                block_size_tokens=BLOCK_SIZE,
                enable_prefix_caching=self.context.enable_prefix_caching,
            )
        return self.requests[job.request_id]

    def admit(self, chunk_limit: int) -> None:
        """Admit from the head of the queue while the context takes it; chunks at most one prompt."""
        context, unchanged = self.context, True
        while self.waiting:
            job = self.waiting[0]
            request = self.request_for(job)
            remaining = request.remaining_prompt_length
            chunk = remaining
            if context.is_chunked_prefill_enabled() and remaining > chunk_limit:
                chunk = chunk_limit if remaining - chunk_limit != 1 else chunk_limit - 1
            before = snapshot(context)
            try:
                context.add_request(request, chunk)
            except ContextOverflowError:
                unchanged = snapshot(context) == before
                context.check_integrity()
                break
            request.advance_chunk(chunk)
            self.running[job.request_id] = job
            context.check_integrity()
            if request.remaining_prompt_length:
                break
            self.waiting.popleft()
        assert unchanged, "a refused add_request left a trace"

    def step(self, *, chunk_limit: int = 6, fail: bool = False, stop: set[int] | None = None) -> None:
        """One engine step; `stop` names running requests that end early, as by a stop word."""
        context = self.context
        context.dynamo_helper.discard_pending_kv_stored_events()
        self.admit(chunk_limit)
        if not context.get_active_request_count():
            self.requeue(context.release_stalled())
            context.check_integrity()
            return
        context.initialize_attention_state()
        if fail:
            self.requeue(context.rollback_step())
            context.check_integrity()
            assert set(context.kv_block_allocator.kv_hash_to_block_id) == self.announced
            return
        self.forward()
        context.dynamo_helper.publish_pending_kv_stored_events()
        context.advance_step()
        self.update(stop or set())

    def forward(self) -> None:
        """Write the step's slots, then check that every row reads its own history and nothing else."""
        context = self.context
        tokens = context.tokens
        rows = range(context.paused_request_count, context.total_request_count)
        histories = {row: self.running[int(context.request_ids[row])].history for row in rows}
        for i in range(context.active_token_count):
            row, position = int(tokens.rows[i]), int(tokens.positions[i])
            assert tokens.input_ids[i] == histories[row][position], "the step runs another token than the request's"
            identity = prefix_identity(histories[row][: position + 1])
            self.slots[int(tokens.block_idx[i]), int(tokens.local_positions[i])] = identity
        for row in rows:
            length = int(context.request_kv_length_offsets[row] + context.request_query_lengths[row])
            for position in range(length):
                block = int(context.request_to_kv_block_ids[row, position // BLOCK_SIZE])
                identity = prefix_identity(histories[row][: position + 1])
                assert self.slots.get((block, position % BLOCK_SIZE)) == identity, (
                    f"row {row} reads foreign keys and values at position {position}"
                )

    def update(self, stop: set[int]) -> None:
        context = self.context
        ids = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        mask, sampled = [], []
        for request_id in ids:
            job = self.running[request_id]
            token = next_token(job.history)
            sampled.append(token)
            if context.chunked_prefill_request_id == request_id:
                mask.append(1)
                continue
            job.generated.append(token)
            done = len(job.generated) >= job.generate or request_id in stop
            mask.append(int(not done))
            if done:
                self.finished[request_id] = self.running.pop(request_id)
                self.skipped_tokens += self.requests.pop(request_id).num_skipped_tokens
        result = context.update_requests(torch.tensor(mask), torch.tensor(sampled))
        if result is not None and result["evict_request_ids"] is not None:
            self.requeue(result["evict_request_ids"].tolist())
        context.check_integrity()
        assert set(context.kv_block_allocator.kv_hash_to_block_id) == self.announced

    def requeue(self, ids: list[int]) -> None:
        """Put requests back to the head of the queue, in order; they start over with what they have generated."""
        for request_id in reversed(ids):
            job = self.running.pop(request_id)
            self.requests.pop(request_id)
            if self.waiting and self.waiting[0] is job:
                continue
            # The prompt that is partly in keeps the head: its chunks come first.
            partly_in = self.context.chunked_prefill_request_id
            behind = bool(self.waiting) and self.waiting[0].request_id == partly_in
            self.waiting.insert(int(behind), job)

    def abort(self, request_id: int) -> None:
        removed = self.context.remove_requests([request_id])
        assert removed == [request_id]
        job = self.running.pop(request_id)
        self.requests.pop(request_id)
        if self.waiting and self.waiting[0] is job:
            self.waiting.popleft()
        self.context.check_integrity()

    def reset(self, *, preserve: bool) -> None:
        self.context.reset(preserve_prefix_cache=preserve)
        self.waiting.clear()
        self.running.clear()
        self.requests.clear()
        self.context.check_integrity()
        assert set(self.context.kv_block_allocator.kv_hash_to_block_id) == self.announced

    def run_dry(self) -> None:
        """Step until nothing is left; everything submitted must end."""
        for _ in range(1000):
            if not self.waiting and not self.running:
                return
            self.step()
        raise AssertionError(f"{len(self.waiting)} waiting and {len(self.running)} running never ended")


def snapshot(context: DynamicInferenceContext) -> dict[str, Any]:
    """Everything that a failed call must leave as it was."""
    allocator = context.kv_block_allocator
    return {
        "tables": {name: tensor.tolist() for name, tensor in context.requests.tensors.items()},
        "metadata": {name: tensor.tolist() for name, tensor in context.requests.metadata.items()},
        "tokens": [np.array(column[: context.active_token_count]).tolist() for column in context.tokens.columns],
        "state": (
            context.total_request_count,
            context.paused_request_count,
            context.active_token_count,
            context.num_prefill_requests,
            context.chunked_prefill_request_id,
        ),
        "counters": str(context.counters),
        "free": sorted(allocator.block_bag[: allocator.pool_avail].tolist()),
        "references": allocator.block_ref_counts.tolist() if allocator.enable_prefix_caching else None,
        "hashes": dict(allocator.kv_hash_to_block_id),
        "pending": context.dynamo_helper.has_pending,
    }
