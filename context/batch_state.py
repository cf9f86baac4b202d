"""The counters that say which rows are what; owned here, changed by admission and lifecycle only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class BatchState:
    """Rows [0, paused) are paused, [paused, total) active, [total, max_requests) free."""

    total_request_count: int = 0
    paused_request_count: int = 0
    active_token_count: int = 0
    num_prefill_requests: int = 0
    chunked_prefill_request_id: int = -1
    """The request whose prompt is only partly in; -1: none.  Between steps its row is hidden at `total`."""
    paused_tokens: NDArray[np.int64] | None = None
    """The sampled next token of each paused row, kept between steps."""

    @property
    def active_request_count(self) -> int:
        return self.total_request_count - self.paused_request_count

    @property
    def num_decode_requests(self) -> int:
        return self.active_request_count - self.num_prefill_requests

    def reset(self) -> None:
        self.total_request_count = 0
        self.paused_request_count = 0
        self.active_token_count = 0
        self.num_prefill_requests = 0
        self.chunked_prefill_request_id = -1
        self.paused_tokens = None


@dataclass(slots=True)
class PrefixCounters:
    """What the prefix cache has saved since the last reset of counters (requests, blocks, tokens)."""

    lifetime_prefill_token_count: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_blocks_matched: int = 0
    prefix_cache_prefill_computed_tokens: int = 0
    prefix_cache_prefill_skipped_tokens: int = 0

    def reset(self) -> None:
        self.lifetime_prefill_token_count = 0
        self.prefix_cache_hits = 0
        self.prefix_cache_blocks_matched = 0
        self.prefix_cache_prefill_computed_tokens = 0
        self.prefix_cache_prefill_skipped_tokens = 0
