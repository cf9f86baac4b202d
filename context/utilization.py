"""How full the KV buffer is, in the reference's terms and a few of ours."""

from __future__ import annotations

from typing import Any

from context.parts import ContextParts


def kvcache_utilization_stats(parts: ContextParts) -> dict[str, Any]:
    """Counts and shares (0..1) of the pool's usable blocks, which leave out the dummy block."""
    allocator, state = parts.allocator, parts.state
    usable = allocator.total_count - 1
    allocated = allocator.get_total_used()
    active = allocator.get_active_used()
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
        "max_requests": parts.sizes.max_requests,
    }
