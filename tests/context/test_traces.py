"""The spec's worked runs, literally: the whole state after every call."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from context import (
    ContextOverflowError,
    DynamicInferenceContext,
    DynamicInferenceRequest,
    InferenceConfig,
    PrefixCachingEvictionPolicy,
    ResumePolicy,
    SamplingParams,
    TransformerConfig,
)

TRACES = json.loads((Path(__file__).parent / "data" / "context_traces.json").read_text())
# 2 x 2 layers x 4 tokens x 2 heads x 16 x 4 bytes = 2,048 bytes a block: the model of the traces.
MODEL = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, kv_channels=16)


def build(config: dict[str, str]) -> DynamicInferenceContext:
    values: dict[str, Any] = {"enable_prefix_caching": True}
    for name, text in config.items():
        if name == "prefix_caching_eviction_policy":
            values[name] = PrefixCachingEvictionPolicy[text.split(".")[-1]]
        else:
            values[name] = ast.literal_eval(text)
    # The traces come from the reference: newest resumes first, generated blocks are not hashed.
    return DynamicInferenceContext(
        MODEL,
        InferenceConfig(**values, resume_policy=ResumePolicy.REFERENCE, hash_generated_blocks=False),
    )


class Run:
    """Replays the calls of one trace."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.context = build(trace["config"])
        self.requests: dict[int, DynamicInferenceRequest] = {}
        self.prompts = {}
        for step in trace["steps"]:
            if found := re.match(r"add_request\((\d+), tokens=(\[.*?\]), chunk=(\S+), generate=(\d+)\)", step["op"]):
                self.prompts[int(found[1])] = (ast.literal_eval(found[2]), int(found[4]))
        self.names: dict[int, str] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.context.dynamo_helper.add_kv_event_listener(lambda kind, payload: self.events.append((kind, payload)))

    def request(self, request_id: int) -> DynamicInferenceRequest:
        if request_id not in self.requests:
            prompt, generate = self.prompts[request_id]
            self.requests[request_id] = DynamicInferenceRequest(
                request_id,
                torch.tensor(prompt),
                SamplingParams(num_tokens_to_generate=generate),
                block_size_tokens=self.context.block_size_tokens,
                enable_prefix_caching=self.context.enable_prefix_caching,
            )
        return self.requests[request_id]

    def call(self, op: str) -> Any:
        context = self.context
        if op == "construct":
            return None
        if found := re.match(r"check_availability\((\d+)\)", op):
            return list(context.check_availability(self.request(int(found[1]))))
        if found := re.match(r"add_request\((\d+), tokens=.*, chunk=(\S+), generate", op):
            request = self.request(int(found[1]))
            chunk = ast.literal_eval(found[2])
            context.add_request(request, prefill_chunk_length=chunk)
            request.advance_chunk(chunk or request.remaining_prompt_length)
            return None
        if op.startswith("initialize_attention_state()"):
            context.initialize_attention_state()
            context.dynamo_helper.publish_pending_kv_stored_events()
            context.advance_step()
            count = context.get_active_request_count()
            cu_query, max_q = context.cu_query_lengths()
            _, kv_lengths, max_k = context.cu_kv_lengths()
            return {
                "padded_tokens": context.padded_active_token_count,
                "padded_requests": context.padded_active_request_count,
                "cu_q": cu_query[: count + 1].tolist(),
                "kv_len": kv_lengths[:count].tolist(),
                "max_q": max_q,
                "max_k": max_k,
                "logit_rows": context.last_token_rows().tolist(),
            }
        if found := re.match(r"update_requests\(mask=(\[.*?\]), new_tokens=(\[.*?\])\)", op):
            result = context.update_requests(
                torch.tensor(ast.literal_eval(found[1])), torch.tensor(ast.literal_eval(found[2]))
            )
            return result and {k: None if v is None else v.tolist() for k, v in result.items()}
        if op == "reset()":
            return context.reset()
        raise AssertionError(f"the trace calls {op!r}, which this test does not know")

    def state(self) -> dict[str, Any]:
        context, allocator = self.context, self.context.kv_block_allocator
        rows, tokens = slice(0, context.total_request_count), slice(0, context.active_token_count)
        state = {
            "total": context.total_request_count,
            "paused": context.paused_request_count,
            "prefill": context.num_prefill_requests,
            "active_tokens": context.active_token_count,
            "pool_avail": allocator.pool_avail,
            "request_ids": context.request_ids[rows].tolist(),
            "query_len": context.request_query_lengths[rows].tolist(),
            "kv_offset": context.request_kv_length_offsets[rows].tolist(),
            "output_len": context.request_output_lengths[rows].tolist(),
            "block_count": context.request_kv_block_counts[rows].tolist(),
            "last_block": context.request_last_kv_block_id[rows].tolist(),
            "last_offset": context.request_last_kv_block_offset[rows].tolist(),
            "block_table": [[b for b in row if b >= 0] for row in context.request_to_kv_block_ids[rows].tolist()],
            "token_ids": context.token_to_input_ids[tokens].tolist(),
            "token_pos": context.token_to_pos_ids[tokens].tolist(),
            "token_block": context.token_to_block_idx[tokens].tolist(),
            "token_row": context.token_to_request_idx[tokens].tolist(),
        }
        if context.enable_prefix_caching:
            state["registered"] = {self.name(h): b for h, b in allocator.kv_hash_to_block_id.items()}
            hashes = allocator.block_hashes.tolist()
            refs = enumerate(allocator.block_ref_counts.tolist())
            state["ref_counts"] = {str(block): ref for block, ref in refs if ref or hashes[block] != -1}
            state["allocatable"] = allocator.get_allocatable_count()
        if self.events:
            state["events"] = [[kind, self.named(payload)] for kind, payload in self.events]
        return state

    def name(self, block_hash: int) -> str:
        """The trace's name of a hash: h0, h1, ... in order of first registration."""
        return self.names.setdefault(block_hash, f"h{len(self.names)}")

    def named(self, payload: dict[str, Any]) -> dict[str, Any]:
        named = dict(payload)
        if "block_hashes" in named:
            named["block_hashes"] = [self.name(block_hash) for block_hash in named["block_hashes"]]
        if named.get("parent_hash") is not None:
            named["parent_hash"] = self.name(named["parent_hash"])
        return named


@pytest.mark.parametrize("trace", TRACES, ids=[trace["name"] for trace in TRACES])
def test_every_call_of_the_trace_returns_and_leaves_what_the_spec_says(trace: dict[str, Any]) -> None:
    run = Run(trace)
    for number, step in enumerate(trace["steps"]):
        where = f"{trace['name']} step {number}: {step['op']}"
        run.events.clear()
        if "raises" in step:
            with pytest.raises(ContextOverflowError) as caught:
                run.call(step["op"])
            assert type(caught.value).__name__ == step["raises"], where
        else:
            returned = run.call(step["op"])
            assert returned == step.get("returns"), where
        expected = step["state"]
        state = run.state()
        assert state == expected, where
        run.context.check_integrity()
