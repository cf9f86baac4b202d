"""How full the KV buffer is, in the reference's terms and a few of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from context.dynamic_context import DynamicInferenceContext


def distinct_blocks(context: DynamicInferenceContext, start: int, end: int) -> int:
    """Blocks that rows [start, end) hold; a shared one counts once with prefix caching (without, none is shared)."""
    table = context.requests.block_table[start:end]
    blocks = table[table >= 0]
    return len(np.unique(blocks)) if context.enable_prefix_caching else len(blocks)


def kvcache_utilization_stats(context: DynamicInferenceContext) -> dict[str, Any]:
    """Counts and shares (0..1) of the pool's usable blocks, which leave out the dummy block."""
    allocator, state = context.kv_block_allocator, context.state
    usable = allocator.total_count - 1
    allocated = allocator.get_total_used()
    active = distinct_blocks(context, state.paused_request_count, state.total_request_count)
    return {
        "total_blocks": usable,
        "allocated_blocks": allocated,
        "active_unique_blocks": active,
        "allocated_utilization": allocated / usable,
        "active_utilization": active / usable,
        "active_request_count": state.active_request_count,
        "paused_request_count": state.paused_request_count,
        "gtd_block_count": usable - allocator.paused_limit,
        "block_count_avail": allocator.pool_avail,
        "active_token_count": state.active_token_count,
        "total_request_count": state.total_request_count,
        "max_requests": context.max_requests,
    }
