"""The reference's names for tensors and counters, as read-through properties: each leads to the piece that owns it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _request_tensor(name: str) -> Any:
    return property(lambda context: context.requests.tensors[name], doc=f"`{name}` of the request table.")


def _token_tensor(name: str) -> Any:
    return property(lambda context: context.tokens.tensors[name], doc=f"`{name}` of the token table (CPU side).")


def _counter(owner: str, name: str) -> Any:
    def read(context: Any) -> Any:
        return getattr(getattr(context, owner), name)

    def write(context: Any, value: Any) -> None:
        setattr(getattr(context, owner), name, value)

    return property(read, write, doc=f"`{name}` of the context's {owner}.")


class ReferenceNames:
    """Mixed into the facade, so that someone who knows the reference finds every name where it was."""

    request_ids: Tensor = _request_tensor("request_ids")
    request_query_lengths: Tensor = _request_tensor("request_query_lengths")
    request_in_prefill_status_tensor: Tensor = _request_tensor("request_in_prefill_status_tensor")
    request_output_lengths: Tensor = _request_tensor("request_output_lengths")
    request_kv_length_offsets: Tensor = _request_tensor("request_kv_length_offsets")
    request_kv_block_counts: Tensor = _request_tensor("request_kv_block_counts")
    request_last_kv_block_id: Tensor = _request_tensor("request_last_kv_block_id")
    request_last_kv_block_offset: Tensor = _request_tensor("request_last_kv_block_offset")
    request_to_kv_block_ids: Tensor = _request_tensor("request_to_kv_block_ids")

    token_to_input_ids: Tensor = _token_tensor("token_to_input_ids")
    token_to_pos_ids: Tensor = _token_tensor("token_to_pos_ids")
    token_to_block_idx: Tensor = _token_tensor("token_to_block_idx")
    token_to_local_position_within_kv_block: Tensor = _token_tensor("token_to_local_position_within_kv_block")
    token_to_request_idx: Tensor = _token_tensor("token_to_request_idx")
    token_to_position_in_request: Tensor = _token_tensor("token_to_position_in_request")

    total_request_count: int = _counter("state", "total_request_count")
    paused_request_count: int = _counter("state", "paused_request_count")
    active_token_count: int = _counter("state", "active_token_count")
    num_prefill_requests: int = _counter("state", "num_prefill_requests")
    chunked_prefill_request_id: int = _counter("state", "chunked_prefill_request_id")

    lifetime_prefill_token_count: int = _counter("counters", "lifetime_prefill_token_count")
    prefix_cache_hits: int = _counter("counters", "prefix_cache_hits")
    prefix_cache_blocks_matched: int = _counter("counters", "prefix_cache_blocks_matched")
    prefix_cache_prefill_computed_tokens: int = _counter("counters", "prefix_cache_prefill_computed_tokens")
    prefix_cache_prefill_skipped_tokens: int = _counter("counters", "prefix_cache_prefill_skipped_tokens")

    prefix_cache_lru_clock: int = _counter("kv_block_allocator", "lru_clock")

    @property
    def request_metadata(self) -> dict[str, Tensor]:
        """Per-request metadata by label, each of length max_requests."""
        metadata: dict[str, Tensor] = self.requests.metadata  # type: ignore[attr-defined]
        return metadata

    @property
    def paused_tokens(self) -> Tensor | None:
        """The sampled next token of each paused row, or None."""
        import torch

        tokens = self.state.paused_tokens  # type: ignore[attr-defined]
        return None if tokens is None else torch.from_numpy(tokens)
