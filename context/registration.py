"""Registers completed blocks under their hashes and queues their stored events; takes back what was never written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from context.block_allocator import NO_PARENT, UNREGISTERED, KVBlockAllocator
from context.block_hash import ROOT_DIGEST, hash_block
from context.dynamo_helper import DynamoHelper
from context.request import DynamicInferenceRequest
from context.request_table import RequestTable


class BlockRegistrar:
    """Owns the tokens of each block `[pool_size, block_size]` and the list of blocks registered but not yet written.

    A hash is carried by one block only: a block that completes under a hash which another block carries already is
    given back, and its row continues on the other.  So a row's registered blocks are always one chain in the map, and
    what is held is never below something evictable.
    """

    def __init__(
        self, allocator: KVBlockAllocator, helper: DynamoHelper, block_size: int, *, hash_generated: bool
    ) -> None:
        self._allocator = allocator
        self._helper = helper
        self._block_size = block_size
        self.hash_generated = hash_generated and allocator.enable_prefix_caching
        self._tokens: NDArray[np.int64] = np.zeros((allocator.total_count, block_size), dtype=np.int64)
        self._unwritten: list[int] = []
        helper.add_step_hooks(self.commit, self.rollback)

    # -- the step's fate -------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """The forward succeeded: what was registered for it holds."""
        self._unwritten.clear()

    def rollback(self) -> None:
        """The forward failed: blocks registered for it were never written and must not be matched."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, []
            self._allocator.unregister(unwritten)

    def forget(self) -> None:
        """Drop the list, as for a reset that frees every block anyway."""
        self._unwritten.clear()

    @property
    def unwritten_blocks(self) -> tuple[int, ...]:
        return tuple(self._unwritten)

    # -- token history ---------------------------------------------------------------------------------------------

    def note_tokens(
        self, blocks: NDArray[np.integer], local_positions: NDArray[np.integer], tokens: NDArray[np.int64]
    ) -> None:
        """Remember which tokens stand in which slots, so that a block can be hashed when it fills."""
        if self.hash_generated:
            self._tokens[blocks, local_positions] = tokens

    # -- prompts ---------------------------------------------------------------------------------------------------

    def adopt_carried_block(self, requests: RequestTable, row: int, index: int, block_hash: int) -> None:
        """Before a row's block completes: if another block carries its hash already, put that one into the row."""
        carrier = self._allocator.kv_hash_to_block_id.get(block_hash)
        own = int(requests.block_table[row, index])
        if carrier is None or carrier == own:
            return
        self._allocator.retain([carrier])
        self._allocator.release_memory_blocks([own])
        requests.block_table[row, index] = carrier
        if index == requests.block_counts[row] - 1:
            requests.last_blocks[row] = carrier

    def register_prompt(
        self, request: DynamicInferenceRequest, blocks: NDArray[np.int32], start: int, end: int
    ) -> None:
        """Register blocks [start, end) of a prompt, for a forward that is about to write them."""
        if start >= end:
            return
        hashes = request.precomputed_block_hashes
        ids = blocks[start:end].tolist()
        fresh = [b for b in ids if self._allocator.hash_of(b) == UNREGISTERED]
        parents = [hashes[k - 1] if k else NO_PARENT for k in range(start, end)]
        self._allocator.register_kv_block_hashes(
            ids, hashes[start:end], parents, request.precomputed_block_digests[start:end]
        )
        self._unwritten.extend(fresh)
        tokens = request.prompt[start * self._block_size : end * self._block_size]
        self._queue(hashes[start:end], tokens.tolist(), parents[0] or None)

    # -- generated tokens ------------------------------------------------------------------------------------------

    def register_generated(self, requests: RequestTable, rows: NDArray[np.intp]) -> None:
        """Register the blocks that the forward just run has filled, from prompt and generated tokens."""
        if not self.hash_generated:
            return
        full = rows[(requests.last_offsets[rows] == self._block_size - 1) & requests.hashable[rows]]
        if not len(full):
            return
        last = requests.block_counts[full] - 1
        blocks = requests.block_table[full, last]
        parents = np.where(last > 0, requests.block_table[full, last - 1], -1)
        tokens = self._tokens[blocks]
        for i, (row, index, block, parent) in enumerate(
            zip(full.tolist(), last.tolist(), blocks.tolist(), parents.tolist(), strict=True)
        ):
            self._register_filled(requests, row, index, block, parent, tokens[i])

    def _register_filled(
        self, requests: RequestTable, row: int, index: int, block: int, parent: int, tokens: NDArray[np.int64]
    ) -> None:
        """Name one filled block by its parent's digest and its tokens; nothing happens if the parent has no name."""
        allocator = self._allocator
        if allocator.hash_of(block) != UNREGISTERED or block == allocator.dummy_block_idx:
            return
        parent_hash, parent_digest = NO_PARENT, ROOT_DIGEST
        if index:
            parent_hash, digest = allocator.hash_of(parent), allocator.digests[parent]
            if parent_hash == UNREGISTERED or digest is None:
                return
            parent_digest = digest
        named = hash_block(parent_digest, tokens)
        if named.hash in allocator.kv_hash_to_block_id:
            self.adopt_carried_block(requests, row, index, named.hash)
            return
        allocator.register_kv_block_hashes([block], [named.hash], [parent_hash], [named.digest])
        if self._helper.has_kv_event_listeners:
            self._queue([named.hash], tokens.tolist(), parent_hash or None)

    def _queue(self, hashes: Sequence[int], tokens: list[int], parent_hash: int | None) -> None:
        if self._helper.has_kv_event_listeners:
            self._helper.queue_kv_stored_event(
                {
                    "block_hashes": list(hashes),
                    "token_ids": tokens,
                    "num_block_tokens": [self._block_size] * len(hashes),
                    "parent_hash": parent_hash,
                }
            )
