"""Attention through the real context equals plain attention: chunks, prefix hits, sharing in a step, mixed batches.

Keys, values and queries are fixed functions of (token, position), so what a token attends to is known from its
request's history alone.  Max abs difference allowed: 2e-5 in float32.
"""

from __future__ import annotations

import math

import pytest
import torch

from context import (
    DynamicInferenceContext,
    DynamicInferenceRequest,
    InferenceConfig,
    PrefixCachingEvictionPolicy,
    SamplingParams,
    TransformerConfig,
)

HEADS, KV_HEADS, DIM, LAYERS, BLOCK = 4, 2, 64, 2, 8
TOLERANCE = 2e-5


@pytest.fixture(params=["torch", "triton"])
def context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DynamicInferenceContext:
    monkeypatch.setenv("WARMROUTE_KERNELS", request.param)
    if request.param == "triton" and not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return DynamicInferenceContext(
        TransformerConfig(
            num_layers=LAYERS, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=KV_HEADS
        ),
        InferenceConfig(
            max_sequence_length=128,
            buffer_size_gb=40 * 2 * LAYERS * BLOCK * KV_HEADS * DIM * 4 / 1024**3,
            block_size_tokens=BLOCK,
            max_requests=8,
            max_tokens=256,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            enable_chunked_prefill=True,
        ),
    )


def project(tokens: torch.Tensor, positions: torch.Tensor, layer: int, heads: int, which: int) -> torch.Tensor:
    """`[tokens, heads, dim]`: a fixed, well mixed function of token, position and layer."""
    lane = torch.arange(heads * DIM, dtype=torch.float64) + 1
    phase = tokens.double()[:, None] * 0.37 + positions.double()[:, None] * 0.11 + layer * 0.5 + which
    return torch.sin(phase * lane * 0.7 + which).view(-1, heads, DIM).float()


def run_step(context: DynamicInferenceContext) -> list[torch.Tensor]:
    """One forward: per layer the attention's output for the real tokens `[tokens, heads, dim]`."""
    context.initialize_attention_state()
    ids, positions = (tensor[0] for tensor in context.current_input_and_position_ids())
    outputs = []
    for layer in range(1, LAYERS + 1):
        key = project(ids, positions, layer, KV_HEADS, 1).unsqueeze(1)
        value = project(ids, positions, layer, KV_HEADS, 2).unsqueeze(1)
        context.append_key_value_cache(layer, key, value)
        query = project(ids, positions, layer, HEADS, 3).unsqueeze(1)
        outputs.append(context.attention(layer, query)[: context.active_token_count, 0])
    context.dynamo_helper.publish_pending_kv_stored_events()
    context.advance_step()
    return outputs


def expected(history: list[int], first: int, layer: int) -> torch.Tensor:
    """Plain causal attention over a whole history, in float64; rows from position `first` on."""
    tokens, positions = torch.tensor(history), torch.arange(len(history))
    q = project(tokens, positions, layer, HEADS, 3).double()
    k = project(tokens, positions, layer, KV_HEADS, 1).double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    v = project(tokens, positions, layer, KV_HEADS, 2).double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    scores.masked_fill_(torch.ones(len(history), len(history), dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[first:]


def assert_step(context: DynamicInferenceContext, histories: list[tuple[list[int], int]]) -> None:
    """Run a step and compare; `histories` gives each active row's tokens so far and the first position that it runs."""
    outputs = run_step(context)
    for layer, output in enumerate(outputs, start=1):
        plain = torch.cat([expected(history, first, layer) for history, first in histories])
        assert output.shape == plain.shape
        difference = (output.double() - plain).abs().max().item()
        assert difference < TOLERANCE, f"layer {layer}: max abs difference {difference}"


def request(number: int, tokens: list[int]) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        number,
        torch.tensor(tokens),
        SamplingParams(num_tokens_to_generate=8),
        block_size_tokens=BLOCK,
        enable_prefix_caching=True,
    )


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]


def test_a_prompt_in_chunks(context: DynamicInferenceContext) -> None:
    chunked = request(1, PROMPT)
    for first, end in ((0, 9), (9, 16), (16, 22)):
        context.add_request(chunked, end - first)
        chunked.advance_chunk(end - first)
        assert_step(context, [(PROMPT[:end], first)])
        context.update_requests(torch.tensor([1]), torch.tensor([7]))
    assert_step(context, [([*PROMPT, 7], 22)])


def test_a_prefix_hit_reads_what_the_earlier_prompt_wrote(context: DynamicInferenceContext) -> None:
    context.add_request(request(1, PROMPT))
    run_step(context)
    context.update_requests(torch.tensor([0]), torch.tensor([7]))
    follow_up = [*PROMPT[:17], 1, 1, 2]
    second = request(2, follow_up)
    context.add_request(second)
    assert second.num_skipped_tokens == 16
    assert_step(context, [(follow_up, 16)])


def test_prompts_of_one_step_share_a_prefix(context: DynamicInferenceContext) -> None:
    other = [*PROMPT[:16], 2, 7, 1]
    context.add_request(request(1, PROMPT))
    second = request(2, other)
    context.add_request(second)
    assert second.num_skipped_tokens == 16
    assert_step(context, [(PROMPT, 0), (other, 16)])


def test_decode_prefill_and_chunk_in_one_batch(context: DynamicInferenceContext) -> None:
    context.add_request(request(1, PROMPT[:9]))
    run_step(context)
    context.update_requests(torch.tensor([1]), torch.tensor([5]))
    chunked = request(3, PROMPT[::-1])
    context.add_request(request(2, PROMPT[:4]))
    context.add_request(chunked, 10)
    assert_step(context, [([*PROMPT[:9], 5], 9), (PROMPT[:4], 0), (PROMPT[::-1][:10], 0)])


def test_a_match_through_generated_tokens(context: DynamicInferenceContext) -> None:
    context.add_request(request(1, PROMPT[:6]))
    history = list(PROMPT[:6])
    for token in range(12):
        run_step(context)
        history.append(token)
        context.update_requests(torch.tensor([int(token < 11)]), torch.tensor([token]))
    follow_up = [*history, 4, 4, 4]
    second = request(2, follow_up)
    context.add_request(second)
    assert second.num_skipped_tokens == 16
    assert_step(context, [(follow_up, 16)])
