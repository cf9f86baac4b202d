"""The pieces of one context, for the functions that work on several of them."""

from __future__ import annotations

from dataclasses import dataclass

from context.batch_state import BatchState, PrefixCounters
from context.block_allocator import KVBlockAllocator
from context.config import ContextSizes
from context.dynamo_helper import DynamoHelper
from context.lifecycle import Lifecycle
from context.registration import BlockRegistrar
from context.request_table import RequestTable
from context.token_table import TokenTable


@dataclass(slots=True)
class ContextParts:
    """Each owns its state; nothing here is kept twice."""

    sizes: ContextSizes
    block_size: int
    max_sequence_length: int
    state: BatchState
    counters: PrefixCounters
    requests: RequestTable
    tokens: TokenTable
    allocator: KVBlockAllocator
    helper: DynamoHelper
    registrar: BlockRegistrar
    lifecycle: Lifecycle

    def chunked_row(self, *, among_hidden: bool = False) -> int:
        """The row of the partly admitted request among the active rows (or beyond them as well); -1: none."""
        if self.state.chunked_prefill_request_id < 0:
            return -1
        end = self.sizes.max_requests if among_hidden else self.state.total_request_count
        return self.requests.find(self.state.chunked_prefill_request_id, end)

    @property
    def has_hidden_chunk(self) -> bool:
        """Whether a partly admitted request waits right of the active rows for its next chunk."""
        return self.state.chunked_prefill_request_id >= 0 and self.chunked_row() < 0
