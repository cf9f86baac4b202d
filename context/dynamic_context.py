"""The dynamic inference context: a thin facade over the pieces that own its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from context import admission, log_probs
from context.attention import AttentionMetadata
from context.batch_dimensions import InferenceBatchDimensions
from context.batch_state import BatchState, PrefixCounters
from context.block_allocator import KVBlockAllocator
from context.config import InferenceConfig, TransformerConfig, derive_sizes, round_up
from context.dynamo_helper import DynamoHelper
from context.errors import TensorStateDeallocatedError
from context.integrity import check_context_integrity
from context.kernels import backend_for
from context.kv_cache import KVCacheBuffer
from context.lifecycle import Lifecycle
from context.parts import ContextParts
from context.prefix import PrefixMatch, compute_prefix_match, find_kv_match
from context.reference_names import ReferenceNames
from context.registration import BlockRegistrar
from context.request import DynamicInferenceRequest
from context.request_table import RequestTable
from context.row_removal import remove_rows
from context.step import StepPreparation
from context.token_table import TokenTable
from context.unsupported import UnsupportedFeatures
from context.utilization import kvcache_utilization_stats


class DynamicInferenceContext(ReferenceNames, UnsupportedFeatures):
    """In-flight batching over a block-level KV cache.

    A step is: `dynamo_helper.discard_pending_kv_stored_events()`, `add_request` for what is admitted,
    `initialize_attention_state()`, the model's forward (`append_key_value_cache` and `attention` in every layer),
    sampling, `dynamo_helper.publish_pending_kv_stored_events()`, `advance_step()`, `update_requests()`.  A forward that
    failed is followed by `rollback_step()` instead.

    Not thread-safe: one engine thread calls everything.
    """

    DEFAULT_MAX_TOKENS = 16384
    TOKEN_ROUNDER = 64
    REQUEST_ROUNDER = 4
    TMS_TAG = "inference_context"

    def __init__(self, model_config: TransformerConfig, inference_config: InferenceConfig) -> None:
        self.model_config = model_config
        self.config = inference_config
        self.block_size_tokens = inference_config.block_size_tokens
        self.sizes = derive_sizes(
            model_config,
            inference_config,
            default_max_tokens=self.DEFAULT_MAX_TOKENS,
            request_rounder=self.REQUEST_ROUNDER,
        )
        self.device = torch.device(inference_config.device or "cpu")
        self.kernels = backend_for(self.device)
        self.max_sequence_length = inference_config.max_sequence_length
        self.max_requests = self.sizes.max_requests
        self.max_tokens = self.sizes.max_tokens
        self.max_kv_block_count = self.sizes.max_kv_block_count
        self.block_size_bytes = self.sizes.block_bytes
        self.num_speculative_tokens = inference_config.num_speculative_tokens
        self.enable_prefix_caching = inference_config.enable_prefix_caching
        self.dynamo_helper = DynamoHelper()
        self.kv_block_allocator = KVBlockAllocator(
            self.sizes.pool_size,
            self.sizes.paused_limit,
            enable_prefix_caching=inference_config.enable_prefix_caching,
            policy=inference_config.prefix_caching_eviction_policy,
        )
        self.kv_block_allocator.add_deregistration_observer(self.dynamo_helper.on_kv_blocks_deregistered)
        self.state = BatchState()
        self.counters = PrefixCounters()
        self.step_count = 0
        self.initialize_all_tensors()

    # -- memory ----------------------------------------------------------------------------------------------------

    def initialize_all_tensors(self) -> None:
        """Allocate the KV buffer, the request and token tables and the staging buffer."""
        self.requests = RequestTable(self.max_requests, self.max_kv_block_count, self.config.metadata_types)
        self.step = StepPreparation(
            self.requests,
            self.state,
            self.sizes,
            self.block_size_tokens,
            self.kv_block_allocator.dummy_block_idx,
            self.device,
        )
        self.tokens: TokenTable = self.step.tokens
        self.registrar = BlockRegistrar(
            self.kv_block_allocator,
            self.dynamo_helper,
            self.block_size_tokens,
            hash_generated=self.config.hash_generated_blocks,
        )
        self.lifecycle = Lifecycle(
            self.state,
            self.requests,
            self.tokens,
            self.kv_block_allocator,
            self.registrar,
            self.sizes,
            self.block_size_tokens,
            self.config.resume_policy,
        )
        self.kv_block_allocator.attach_rows(
            lambda: (
                self.requests.block_table[self._active],
                self.requests.block_table[: self.state.paused_request_count],
            )
        )
        self.parts = ContextParts(
            sizes=self.sizes,
            block_size=self.block_size_tokens,
            max_sequence_length=self.max_sequence_length,
            state=self.state,
            counters=self.counters,
            requests=self.requests,
            tokens=self.tokens,
            allocator=self.kv_block_allocator,
            helper=self.dynamo_helper,
            registrar=self.registrar,
            lifecycle=self.lifecycle,
        )
        self._allocate_memory_buffer()
        self.is_tensor_state_allocated = True

    def _allocate_memory_buffer(self) -> None:
        self.kv_cache = KVCacheBuffer(
            self.model_config.num_layers,
            self.sizes.pool_size,
            self.block_size_tokens,
            self.model_config.kv_heads_per_rank,
            self.model_config.head_dim,
            self.model_config.params_dtype,
            self.device,
        )

    @property
    def memory_buffer(self) -> Tensor:
        """`[2 (key, value), layers, pool_size, block size, kv heads, head_dim]`."""
        return self.kv_cache.buffer

    @classmethod
    def round_up_tokens(cls, value: int, tp_size: int | None = None) -> int:
        """Round up to a multiple of ceil(64 / tp) x tp."""
        return round_up(value, cls.TOKEN_ROUNDER, tp_size or 1)

    @classmethod
    def round_up_requests(cls, value: int, tp_size: int | None = None) -> int:
        """Round up to a multiple of ceil(4 / tp) x tp."""
        return round_up(value, cls.REQUEST_ROUNDER, tp_size or 1)

    # -- what is in it ---------------------------------------------------------------------------------------------

    def is_static_batching(self) -> bool:
        return False

    def is_chunked_prefill_enabled(self) -> bool:
        return self.config.enable_chunked_prefill

    def is_decode_only(self) -> bool:
        """Whether no active row is in prefill."""
        return self.state.num_prefill_requests == 0

    def using_cuda_graph_this_step(self) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        """Whether any row is left, the hidden row of a chunked prompt included."""
        return self.state.total_request_count > 0 or self.state.chunked_prefill_request_id >= 0

    def get_active_request_count(self) -> int:
        return self.state.active_request_count

    @property
    def num_decode_requests(self) -> int:
        return self.state.num_decode_requests

    def get_index_of_chunked_prefill_request(self, safe: bool = True) -> int:
        """The row of the chunked request, or -1; `safe=False` looks beyond the active rows as well."""
        return self.parts.chunked_row(among_hidden=not safe)

    def get_kvcache_utilization_stats(self) -> dict[str, Any]:
        """Counts and shares of the KV buffer in use (names of the spec, section 12.11)."""
        return kvcache_utilization_stats(self.parts)

    # -- admission -------------------------------------------------------------------------------------------------

    def check_availability(self, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
        """Whether a row, the tokens and the blocks for all that remains of a prompt are there."""
        return admission.check_availability(self.parts, req)

    def add_request(self, req: DynamicInferenceRequest, prefill_chunk_length: int | None = None) -> None:
        """Put a prompt, or its next chunk, into the batch; a call that raises changes nothing.

        Args:
            req: the request; its `finished_chunk_token_count` says where the chunk starts, and the caller advances it.
            prefill_chunk_length: tokens of this chunk; None: all that remain.

        Raises:
            TensorStateDeallocatedError, RequestOverflowError, TokenOverflowError, BlockOverflowError: no room now.
            MaxSequenceLengthOverflowError: the request can never fit.
            ValueError: the chunk's length is not in 1..remaining, or the request is not the one the chunk belongs to.
        """
        self._require_tensor_state(req.request_id)
        admission.add_request(self.parts, req, prefill_chunk_length)

    def add_dummy_requests_parallel(
        self, requests: Sequence[DynamicInferenceRequest], *, count_as_prefill: bool = True
    ) -> None:
        """Add warm-up requests on the dummy block, without taking real blocks; `reset()` removes them."""
        admission.add_dummy_requests(self.parts, requests, count_as_prefill=count_as_prefill)

    def _compute_prefix_match(self, req: DynamicInferenceRequest, prefill_chunk_length: int) -> PrefixMatch:
        return compute_prefix_match(self.kv_block_allocator, req, prefill_chunk_length, self.block_size_tokens)

    def _find_kv_match_count(
        self, req: DynamicInferenceRequest, start_block: int, end_block: int
    ) -> tuple[list[int], int]:
        return find_kv_match(self.kv_block_allocator, req.precomputed_block_hashes, start_block, end_block)

    def _require_tensor_state(self, request_id: int | None) -> None:
        """Raise TensorStateDeallocatedError while the buffers are given back."""
        if not self.is_tensor_state_allocated:
            raise TensorStateDeallocatedError(
                request_id, "the context's buffers are deallocated; resume the engine first"
            )

    # -- the step --------------------------------------------------------------------------------------------------

    def initialize_attention_state(
        self,
        *,
        construct_graph_dimensions: InferenceBatchDimensions | None = None,
        is_expert_parallel_dummy_cuda_graph_step: bool = False,
        transfer_bookkeeping_to_gpu: bool = True,
        record_bookkeeping_done_event: bool = False,
    ) -> None:
        """Pad the batch and publish its shape to the device, for every layer of the coming forward."""
        if construct_graph_dimensions is not None:
            raise NotImplementedError("CUDA graphs (construct_graph_dimensions) are not supported by this context")
        if is_expert_parallel_dummy_cuda_graph_step:
            raise NotImplementedError("expert parallelism is not supported by this context")
        if not transfer_bookkeeping_to_gpu or record_bookkeeping_done_event:
            raise NotImplementedError("async scheduling is not supported by this context")
        self.step.prepare(
            self.round_up_tokens(self.state.active_token_count, self.model_config.tensor_model_parallel_size),
            self.round_up_requests(self.get_active_request_count(), self.model_config.tensor_model_parallel_size),
        )

    def transfer_bookkeeping_to_gpu(self, skip_token_input_ids: bool = False, record_done_event: bool = False) -> None:
        """Copy the staged step to the device again, in one copy."""
        if skip_token_input_ids or record_done_event:
            raise NotImplementedError("async scheduling is not supported by this context")
        self.step.staging.transfer()

    def build_active_slices(self, batch_size: int) -> None:
        """Stage the request fields of the active rows at [0, batch_size)."""
        self.step.build_active_slices(batch_size)

    def pad_active_slices(self) -> None:
        """Give the padding rows harmless values."""
        self.step.pad_active_slices()

    @property
    def attention_metadata(self) -> AttentionMetadata:
        return self.step.metadata

    @property
    def padded_batch_dimensions(self) -> InferenceBatchDimensions:
        return self.step.padded

    @property
    def padded_active_token_count(self) -> int:
        return self.step.padded.token_count

    @property
    def padded_active_request_count(self) -> int:
        return self.step.padded.req_count

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        """Cumulative query lengths `[padded requests + 1]` int32 on the device, and the longest."""
        return self.step.metadata.cu_query_lengths, self.step.metadata.max_seqlen_q

    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        """Cumulative and plain KV lengths (int32, device), and the longest."""
        metadata = self.step.metadata
        return metadata.cu_kv_lengths, metadata.kv_lengths, metadata.max_seqlen_k

    def get_active_sequence_lengths(self) -> Tensor:
        """Tokens of each active row, this step's included: `[A]` int32 on the CPU."""
        rows = self._active
        return (
            self.requests.tensors["request_kv_length_offsets"][rows]
            + self.requests.tensors["request_query_lengths"][rows]
        )

    def get_max_sequence_lengths(self) -> Tensor:
        """The length at which each active row must stop: `[A]` int32 on the CPU."""
        return self.requests.tensors["request_output_lengths"][self._active]

    def current_input_and_position_ids(self, *, num_warmup_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """The packed input ids and position ids on the device: two `[1, padded tokens]` int64 views."""
        count = num_warmup_tokens if num_warmup_tokens is not None else self.step.padded.token_count
        if count > self.max_tokens:
            raise ValueError(f"num_warmup_tokens is {count}; the context holds {self.max_tokens} tokens at most")
        device = self.step.staging.device
        return (
            device["token_to_input_ids"][:count].unsqueeze(0),
            device["token_to_pos_ids"][:count].unsqueeze(0),
        )

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Write the step's keys and values `[tokens, 1, kv heads, head_dim]` of a 1-based layer.

        `tokens` is at least the step's real tokens; padding beyond the step's padded tokens is ignored.
        """
        keys, values = self.kv_cache.layer(self._layer(layer_number))
        count = min(self.step.padded.token_count, key.shape[0])
        device = self.step.staging.device
        self.kernels.append(
            key[:count, 0],
            value[:count, 0],
            keys,
            values,
            device["token_to_block_idx"][:count],
            device["token_to_local_position_within_kv_block"][:count],
        )

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """A 1-based layer's key and value blocks `[pool, block size, kv heads, head_dim]` and the block table."""
        keys, values = self.kv_cache.layer(self._layer(layer_number))
        return keys, values, self.step.metadata.block_table

    def attention(self, layer_number: int, query: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention of the step's tokens `[padded tokens, 1, heads, head_dim]` over the cache; same shape."""
        keys, values = self.kv_cache.layer(self._layer(layer_number))
        factor = scale if scale is not None else query.shape[-1] ** -0.5
        return self.kernels.step(self.step.metadata, query, keys, values, factor)

    def _layer(self, layer_number: int) -> int:
        mapping = self.model_config.layer_map
        return mapping[layer_number] if mapping is not None else layer_number - 1

    @property
    def num_last_token_logits(self) -> int:
        """Rows that `last_token_logits` returns: one a request."""
        return self.state.active_request_count

    def last_token_rows(self) -> Tensor:
        """Indices `[A]` int64 of each active request's last token in the packed step (device)."""
        return self.step.staging.device["active_request_last_token_idxs"][: self.num_last_token_logits]

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Select each active request's last row: `[1, padded tokens, V]` -> `[A, V]`.

        Raises:
            ValueError: wrong shape.
        """
        padded = self.step.padded.token_count
        if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] != padded:
            raise ValueError(f"logits have shape {tuple(logits.shape)}; expected (1, {padded}, vocabulary)")
        return logits[0].index_select(0, self.last_token_rows())

    def advance_step(self) -> None:
        """Count a finished forward: step_count and the LRU clock + 1."""
        self.step_count += 1
        self.kv_block_allocator.lru_clock += 1

    def update_requests(
        self,
        active_requests_mask: Tensor,
        new_tokens: Tensor,
        new_speculative_tokens: Tensor | None = None,
    ) -> dict[str, Tensor | None] | None:
        """Apply the outcome of a forward that succeeded.

        Args:
            active_requests_mask: `[A]`, 1 where the request goes on.
            new_tokens: `[A]` sampled tokens.
            new_speculative_tokens: must be None (speculative decoding is not supported).

        Returns:
            {"newly_paused_request_ids", "evict_request_ids"} (int32 tensors or None); None if nothing is left.
        """
        if new_speculative_tokens is not None:
            raise NotImplementedError("speculative decoding (new_speculative_tokens) is not supported by this context")
        mask = np.asarray(active_requests_mask.cpu()).astype(bool)
        tokens = np.asarray(new_tokens.cpu()).astype(np.int64)
        expected = self.state.active_request_count
        if mask.shape != (expected,) or tokens.shape != (expected,):
            raise ValueError(
                f"active_requests_mask has shape {mask.shape} and new_tokens {tokens.shape}; "
                f"both must be ({expected},), one entry an active request"
            )
        self.dynamo_helper.publish_pending_kv_stored_events()
        result = self.lifecycle.update(mask, tokens)
        self.dynamo_helper.publish_pending_kv_stored_events()
        return result

    def rollback_step(self) -> list[int]:
        """Undo the admissions of a step whose forward failed.

        Blocks registered for it are un-registered, rows in prefill leave with their blocks; decoding rows stay as they
        were and run again in the next step.

        Returns:
            The ids that left, in row order; the caller restarts those requests (`request.restart()`) at the head of
            its queue.
        """
        self.dynamo_helper.discard_pending_kv_stored_events()
        total = self.state.total_request_count
        rows = np.flatnonzero(self.requests.in_prefill[:total] == 1)
        return remove_rows(self.parts, rows, include_hidden=False)

    def release_stalled(self) -> list[int]:
        """Break a stand-off: no row is active, and what is held (a hidden chunk, paused rows) waits for each other.

        The engine calls it when it could admit nothing and no row is active.  The partly admitted prompt leaves first,
        since it has answered nothing yet; then paused rows resume, the right-most leaving until one can run.

        Returns:
            The ids that left; the caller restarts those requests at the head of its queue.
        """
        if self.get_active_request_count():
            return []
        left: list[int] = []
        if self.state.chunked_prefill_request_id >= 0:
            left = self.remove_requests([self.state.chunked_prefill_request_id])
        evicted = self.lifecycle.wake_paused()
        return left + ([] if evicted is None else evicted.tolist())

    def remove_requests(self, request_ids: Sequence[int]) -> list[int]:
        """Take requests out between two steps, wherever their rows are; return the ids that were found."""
        total = self.state.total_request_count
        rows = np.flatnonzero(np.isin(self.requests.ids[:total], np.asarray(request_ids, dtype=np.int64)))
        hidden = self.state.chunked_prefill_request_id in request_ids and self.parts.has_hidden_chunk
        return remove_rows(self.parts, rows, include_hidden=hidden)

    # -- rows of the lifecycle, public under the reference's names -------------------------------------------------

    def _move_book_keeping_tensors(
        self, src_idxs: Tensor, dst_idxs: Tensor, next_tokens: Tensor, new_speculative_tokens: Tensor | None = None
    ) -> None:
        """Copy whole rows, and their entries of `next_tokens`, from `src_idxs` to `dst_idxs`."""
        if new_speculative_tokens is not None:
            raise NotImplementedError("speculative decoding (new_speculative_tokens) is not supported by this context")
        self.requests.move(src_idxs.numpy().astype(np.intp), dst_idxs.numpy().astype(np.intp))
        next_tokens[dst_idxs] = next_tokens[src_idxs]

    def _swap_book_keeping_tensors(
        self,
        src_idxs: Tensor,
        dst_idxs: Tensor,
        next_tokens: Tensor | None = None,
        new_speculative_tokens: Tensor | None = None,
    ) -> None:
        """Exchange whole rows, and their entries of `next_tokens`, pairwise."""
        if new_speculative_tokens is not None:
            raise NotImplementedError("speculative decoding (new_speculative_tokens) is not supported by this context")
        self.requests.swap(src_idxs.numpy().astype(np.intp), dst_idxs.numpy().astype(np.intp))
        if next_tokens is not None:
            kept = next_tokens[src_idxs].clone()
            next_tokens[src_idxs] = next_tokens[dst_idxs]
            next_tokens[dst_idxs] = kept

    def release_memory_blocks_from_request_indexes(self, request_indexes: Tensor) -> None:
        """Release all blocks of some rows (indexes, not ids) and empty their tables."""
        self.lifecycle.release_rows(np.asarray(request_indexes.cpu()).astype(np.intp))

    def _get_paused_request_count_within_block_budget(self) -> int:
        return self.lifecycle.paused_count_within_budget()

    def _get_releasable_block_counts(self, request_start_idx: int, request_end_idx: int) -> list[int]:
        return self.lifecycle.releasable_block_counts(request_start_idx, request_end_idx)

    def resume_paused_requests(
        self, active_request_count: int, newly_paused_request_ids: Tensor | None
    ) -> tuple[int, Tensor | None]:
        """Resume as many paused requests as compute and blocks permit."""
        ids = None if newly_paused_request_ids is None else newly_paused_request_ids.cpu().numpy()
        active, ids = self.lifecycle.resume(active_request_count, ids)
        return active, None if ids is None else torch.from_numpy(ids.copy())

    def evict_overflow_paused_requests(
        self,
        active_request_count: int,
        next_tokens: Tensor,
        new_speculative_tokens: Tensor | None = None,
    ) -> Tensor | None:
        """Evict paused requests beyond the paused budget; their ids, or None.  `next_tokens` is reordered in place."""
        if new_speculative_tokens is not None:
            raise NotImplementedError("speculative decoding (new_speculative_tokens) is not supported by this context")
        ids = self.lifecycle.evict_with_tokens(active_request_count, next_tokens.numpy())
        return None if ids is None else torch.from_numpy(ids.copy())

    # -- log probabilities -----------------------------------------------------------------------------------------

    def calculate_log_probs_tensors(
        self,
        logits: Tensor,
        new_tokens: Tensor,
        only_last_token_logits: bool | None = False,
        sampling: log_probs.ProcessedLogProbs | None = None,
        row_to_request: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log probabilities of the next tokens (flat, active-token order) and of the whole vocabulary per row.

        Args:
            logits: `[1, rows, V]`.
            new_tokens: `[A]`.
            only_last_token_logits: one row a request instead of one a token.
            sampling: gives processed log probabilities (after temperature and filters); None: raw ones.
            row_to_request: `[rows]` map for `sampling`; None: by query lengths.
        """
        lengths = self.step.metadata.query_lengths_list
        per_request = bool(only_last_token_logits) or self.is_decode_only()
        count = len(lengths) if per_request else sum(lengths)
        if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] < count:
            raise ValueError(
                f"logits have shape {tuple(logits.shape)}; expected (1, at least {count} rows, vocabulary)"
            )
        rows = logits[0, :count]
        targets = new_tokens.to(logits.device)
        if not per_request:
            packed = self.current_input_and_position_ids()[0][0, :count].to(logits.device)
            targets = log_probs.packed_targets(packed, lengths, targets)
        full = self._processed_log_probs(
            rows, len(lengths), None if per_request else torch.tensor(lengths), sampling, row_to_request
        )
        return log_probs.select_targets(full, targets), full

    def _processed_log_probs(
        self,
        logits: Tensor,
        n_active: int,
        active_query_lengths: Tensor | None,
        sampling: log_probs.ProcessedLogProbs | None,
        row_to_request: Tensor | None = None,
    ) -> Tensor:
        lengths = None if active_query_lengths is None else active_query_lengths.tolist()
        return log_probs.row_log_probs(logits, n_active, lengths, sampling, row_to_request)

    def calculate_log_probs(
        self,
        logits: Tensor,
        new_tokens: Tensor,
        only_last_token_logits: bool | None = False,
        sampling: log_probs.ProcessedLogProbs | None = None,
    ) -> tuple[list[list[float]], Tensor]:
        """The same, as one list a request in row order."""
        last_only = bool(only_last_token_logits) or self.is_decode_only()
        selected, full = self.calculate_log_probs_tensors(logits, new_tokens, only_last_token_logits, sampling)
        lengths = [1] * self.num_last_token_logits if last_only else self.step.metadata.query_lengths_list
        return [part.tolist() for part in selected.split(lengths)], full

    # -- reset and integrity ---------------------------------------------------------------------------------------

    def reset_tensors(self) -> None:
        """Write the empty values into all tables."""
        self.requests.reset()
        self.tokens.reset()

    def reset_attention_state(self) -> None:
        """Forget the shape of the last step."""
        self.step.forget()

    def reset_metadata(self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False) -> None:
        """Set all counts to 0 and free every block, unless the prefix cache is preserved."""
        kept = preserve_prefix_cache and self.enable_prefix_caching
        if kept:
            self.lifecycle.release_rows(np.flatnonzero(self.requests.block_table[:, 0] >= 0))
        self.state.reset()
        self.requests.block_table.fill(-1)
        self.reset_attention_state()
        if not kept:
            self.registrar.forget()
            self.kv_block_allocator.reset()
        if not preserve_counters:
            self.counters.reset()

    def reset(self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False) -> None:
        """Empty the context; listeners hear `cleared` last, unless the cache is preserved."""
        self.dynamo_helper.discard_pending_kv_stored_events()
        kept = preserve_prefix_cache and self.enable_prefix_caching
        self.reset_metadata(preserve_prefix_cache, preserve_counters=preserve_counters)
        self.reset_tensors()
        if not preserve_counters:
            self.step_count = 0
            self.kv_block_allocator.lru_clock = 0
        if not kept:
            self.dynamo_helper.notify_kv_cache_cleared()

    def check_integrity(self) -> None:
        """Assert every invariant of the spec's section 14; O(pool size).

        Raises:
            AssertionError: what broke.
        """
        check_context_integrity(self.parts)

    @property
    def _active(self) -> slice:
        return slice(self.state.paused_request_count, self.state.total_request_count)
