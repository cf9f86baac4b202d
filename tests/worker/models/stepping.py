"""Drives the real context and a model step by step, and keeps the logits of every request."""

from collections import defaultdict

import torch
from torch import Tensor

from context import DynamicInferenceContext, DynamicInferenceRequest, InferenceConfig, SamplingParams
from context import PrefixCachingEvictionPolicy as Policy
from worker.models import Model

BLOCK_SIZE = 8


class Stepper:
    """One context over one model.  `logits[request]` collects the row after each step that ran the request."""

    def __init__(self, model: Model, *, max_sequence_length: int = 256) -> None:
        self._model = model
        self.context = DynamicInferenceContext(
            model.transformer_config(),
            InferenceConfig(
                max_sequence_length=max_sequence_length,
                buffer_size_gb=0.05,
                block_size_tokens=BLOCK_SIZE,
                max_requests=8,
                max_tokens=512,
                enable_prefix_caching=True,
                prefix_caching_eviction_policy=Policy.LRU,
                enable_chunked_prefill=True,
            ),
        )
        self.logits: dict[int, list[Tensor]] = defaultdict(list)

    def request(self, number: int, ids: list[int], generate: int = 32) -> DynamicInferenceRequest:
        return DynamicInferenceRequest(
            number,
            torch.tensor(ids),
            SamplingParams(num_tokens_to_generate=generate),
            block_size_tokens=BLOCK_SIZE,
            enable_prefix_caching=True,
        )

    def add(self, request: DynamicInferenceRequest, chunk: int | None = None) -> None:
        """Put the next `chunk` tokens of the prompt, or all that remain, into the coming step."""
        span = chunk or request.remaining_prompt_length
        self.context.add_request(request, prefill_chunk_length=span)
        request.advance_chunk(span)

    def step(self, forced: dict[int, int] | None = None, finish: frozenset[int] = frozenset()) -> dict[int, int]:
        """One step; every row goes on with its likeliest token, or the one in `forced`.  The tokens, by request."""
        context = self.context
        context.initialize_attention_state()
        rows = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        ids, positions = context.current_input_and_position_ids()
        logits = self._model.forward(ids, positions, context, context.last_token_rows())[0].clone()
        tokens = {row: int(logits[place].argmax()) for place, row in enumerate(rows)} | (forced or {})
        for place, row in enumerate(rows):
            self.logits[row].append(logits[place])
        context.dynamo_helper.publish_pending_kv_stored_events()
        context.advance_step()
        mask = torch.tensor([row not in finish for row in rows], dtype=torch.int32)
        context.update_requests(mask, torch.tensor([tokens[row] for row in rows]))
        context.check_integrity()
        return {row: tokens[row] for row in rows}
