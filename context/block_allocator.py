"""The pool of KV blocks: free, held (reference counts), or cached under a hash until somebody needs the place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from context.config import PrefixCachingEvictionPolicy
from context.eviction_order import EvictionOrder

UNREGISTERED = -1
NO_PARENT = 0

DeregistrationObserver = Callable[[list[int], set[int]], None]


def _ids(blocks: torch.Tensor | NDArray | Sequence[int]) -> list[int]:
    return blocks.tolist() if isinstance(blocks, torch.Tensor | np.ndarray) else [int(b) for b in blocks]


class KVBlockAllocator:
    """Owns which block is free, who holds it, and under which hash it is cached.

    Free blocks are a stack `block_bag[0:pool_avail]`; the last block id, pool_size - 1, is the dummy block for
    padding and is never allocated nor registered.  Without prefix caching only the stack is used.

    Args:
        pool_size: blocks in the buffer, the dummy block included.
        paused_limit: blocks that paused requests may keep.
        enable_prefix_caching: count references and keep hashes.
        policy: REF_ZERO frees a block with its last reference; LRU keeps it cached until its place is needed.
    """

    def __init__(
        self,
        pool_size: int,
        paused_limit: int = 0,
        *,
        enable_prefix_caching: bool = False,
        policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.REF_ZERO,
    ) -> None:
        if pool_size < 2:
            raise ValueError(f"pool_size is {pool_size}; at least 2 blocks are needed (one is the dummy block)")
        self.total_count = pool_size
        self.paused_limit = paused_limit
        self.dummy_block_idx = pool_size - 1
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_caching_eviction_policy = policy
        self.block_bag = torch.empty(pool_size, dtype=torch.int32)
        self.block_ref_counts = torch.empty(pool_size, dtype=torch.int32)
        self.block_hashes = torch.empty(pool_size, dtype=torch.int64)
        self.block_timestamps = torch.empty(pool_size, dtype=torch.int64)
        self.block_parents = torch.empty(pool_size, dtype=torch.int32)
        self.block_child_counts = torch.empty(pool_size, dtype=torch.int32)
        self._bag = self.block_bag.numpy()
        self._refs = self.block_ref_counts.numpy()
        self._hashes = self.block_hashes.numpy()
        self._stamps = self.block_timestamps.numpy()
        self._parents = self.block_parents.numpy()
        self._children = self.block_child_counts.numpy()
        # Single numbers are read and written through memoryviews: several times cheaper than numpy scalars.
        self._ref_at = memoryview(self._refs)
        self._hash_at = memoryview(self._hashes)
        self._stamp_at = memoryview(self._stamps)
        self._parent_at = memoryview(self._parents)
        self._child_at = memoryview(self._children)
        self.kv_hash_to_block_id: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        """Hash -> the earlier blocks registered under it, behind the one in the map; empty in practice."""
        self.digests: list[bytes | None] = []
        """Block -> full digest of the chain that ends in it; what a child's hash chains from."""
        self._leaves = EvictionOrder()
        self._evictable = 0
        self._observers: list[DeregistrationObserver] = []
        nothing = np.empty((0, 0), dtype=np.int32)
        self._tables: Callable[[], tuple[NDArray[np.int32], NDArray[np.int32]]] = lambda: (nothing, nothing)
        self.lru_clock = 0
        self.reset()

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def is_lru(self) -> bool:
        return self.enable_prefix_caching and self.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU

    def get_total_used(self) -> int:
        """Blocks that are held or cached."""
        return self.total_count - 1 - self.pool_avail

    def attach_rows(self, tables: Callable[[], tuple[NDArray[np.int32], NDArray[np.int32]]]) -> None:
        """Say where the block tables of active and of paused rows are read (`-1` marks an empty entry)."""
        self._tables = tables

    def get_active_used(self) -> int:
        """Distinct blocks of the active rows."""
        return self._count_blocks(self._tables()[0])

    def get_paused_used(self) -> int:
        """Distinct blocks of the paused rows."""
        return self._count_blocks(self._tables()[1])

    def _count_blocks(self, table: NDArray[np.int32]) -> int:
        blocks = table[table >= 0]
        return len(np.unique(blocks)) if self.enable_prefix_caching else len(blocks)

    def get_evictable_block_count(self) -> int:
        """Cached blocks that nobody holds."""
        return self._evictable

    def get_allocatable_count(self) -> int:
        """Free blocks, plus under LRU those that eviction can free."""
        return self.pool_avail + (self._evictable if self.is_lru else 0)

    def is_memory_available(self, num_blocks: int, potential_matched_count: int = 0) -> bool:
        """Whether `num_blocks` can be allocated after `potential_matched_count` evictable blocks have been pinned."""
        if self.pool_avail >= num_blocks:
            return True
        return self.get_allocatable_count() - potential_matched_count >= num_blocks

    # -- allocate, retain, release ---------------------------------------------------------------------------------

    def allocate_memory_blocks(self, num_blocks: int) -> NDArray[np.int32] | None:
        """Take blocks from the stack (evicting under LRU if it is short); None, and nothing changed, if impossible.

        With caching each block starts with one reference.
        """
        if num_blocks > self.pool_avail:
            short = num_blocks - self.pool_avail
            if not self.is_lru or not self.evict_lru_blocks(short):
                return None
        self.pool_avail -= num_blocks
        blocks = self._bag[self.pool_avail : self.pool_avail + num_blocks].copy()
        if self.enable_prefix_caching:
            self._refs[blocks] = 1
            self._stamps[blocks] = self.lru_clock
        return blocks

    def retain(self, blocks: torch.Tensor | NDArray | Sequence[int]) -> None:
        """Add one reference per occurrence, and refresh the blocks' age."""
        for block in _ids(blocks):
            if self._ref_at[block] == 0 and self._hash_at[block] != UNREGISTERED:
                self._evictable -= 1
                self._leaves.discard(block)
            self._ref_at[block] += 1
            self._stamp_at[block] = self.lru_clock

    def release_memory_blocks(self, blocks: torch.Tensor | NDArray | Sequence[int]) -> None:
        """Give back one reference per occurrence; what nobody holds any more is freed, or stays cached under LRU."""
        ids = _ids(blocks)
        if not ids:
            return
        if not self.enable_prefix_caching:
            self._push(ids)
            return
        freed: list[int] = []
        gone: list[int] = []
        for block in ids:
            refs = self._ref_at[block] - 1
            if refs < 0:
                raise AssertionError(f"block {block} was released more often than it was held")
            self._ref_at[block] = refs
            if refs:
                continue
            if self._hash_at[block] == UNREGISTERED:
                freed.append(block)
                continue
            self._evictable += 1
            if self.is_lru:
                self._note_if_leaf(block)
            else:
                gone.append(block)
        self._push(sorted(freed))
        if gone:
            self.deregister_blocks(sorted(gone))

    # -- hashes ----------------------------------------------------------------------------------------------------

    def register_kv_block_hashes(
        self,
        blocks: Sequence[int] | NDArray | torch.Tensor,
        hashes: Sequence[int],
        parent_hashes: Sequence[int],
        digests: Sequence[bytes] | None = None,
    ) -> None:
        """Make blocks findable by hash; touches no reference count.  Idempotent for the same pair.

        Raises:
            AssertionError: a block is registered under another hash already.
        """
        ids = _ids(blocks)
        fresh: list[tuple[int, int, bytes | None]] = []
        for i, (block, block_hash, parent_hash) in enumerate(zip(ids, hashes, parent_hashes, strict=True)):
            known = self._hash_at[block]
            if known != UNREGISTERED:
                assert known == block_hash, f"block {block} is registered under {known} and can't take {block_hash}"
                continue
            self._hash_at[block] = block_hash
            earlier = self.kv_hash_to_block_id.get(block_hash)
            if earlier is not None:
                self._twins.setdefault(block_hash, []).append(earlier)
            self.kv_hash_to_block_id[block_hash] = block
            fresh.append((block, parent_hash, digests[i] if digests is not None else None))
        for block, parent_hash, digest in fresh:
            self.digests[block] = digest
            parent = self.kv_hash_to_block_id.get(parent_hash, -1) if parent_hash != NO_PARENT else -1
            self._parent_at[block] = parent
            if parent >= 0:
                self._child_at[parent] += 1
                self._leaves.discard(parent)
            if self._ref_at[block] == 0:
                self._evictable += 1
                self._note_if_leaf(block)

    def unregister(self, blocks: Sequence[int]) -> set[int]:
        """Take away the hashes of blocks that keep their holders; return those that no other block carries.

        For blocks whose contents were never written.  Observers are told of the hashes that are gone.
        """
        members = [block for block in blocks if self._hash_at[block] != UNREGISTERED]
        gone = self._forget_hashes(members)
        unheld = [block for block in members if self._ref_at[block] == 0]
        self._push(unheld)
        self._tell(members, gone)
        return gone

    def deregister_blocks(self, blocks: Sequence[int] | NDArray | torch.Tensor) -> None:
        """Forget blocks that nobody holds and put them back on the stack, then tell the observers."""
        ids = _ids(blocks)
        gone = self._forget_hashes(ids)
        self._refs[ids] = 0
        self._stamps[ids] = 0
        self._push(ids)
        self._tell(ids, gone)

    def evict_lru_blocks(self, count: int) -> bool:
        """Free `count` cached blocks, leaves first and the oldest among them; False, nothing changed, if too few.

        O(count log cached).
        """
        if count > self._evictable:
            return False
        taken: list[int] = []
        lost_children: dict[int, int] = {}
        while len(taken) < count:
            block = self._leaves.pop()
            if block is None:
                break
            taken.append(block)
            parent = self._parent_at[block]
            if parent < 0:
                continue
            lost_children[parent] = lost_children.get(parent, 0) + 1
            if self._is_cached(parent) and self._child_at[parent] == lost_children[parent]:
                self._leaves.add(parent, self._stamp_at[parent])
        if len(taken) < count:
            for block in lost_children:
                self._leaves.discard(block)
            for block in taken:
                self._note_if_leaf(block)
            return False
        self._forget_evicted(taken)
        return True

    # -- observers, reset, integrity -------------------------------------------------------------------------------

    def hash_of(self, block: int) -> int:
        """The hash under which a block is registered, or UNREGISTERED."""
        return self._hash_at[block]

    def add_deregistration_observer(self, observer: DeregistrationObserver) -> None:
        """Call `observer(block ids in order of removal, hashes that no block carries any more)` after each removal."""
        self._observers.append(observer)

    def remove_deregistration_observer(self, observer: DeregistrationObserver) -> None:
        self._observers.remove(observer)

    def reset(self) -> None:
        """Make every block free and forget all hashes; observers are not told (the context sends `cleared`)."""
        self.block_bag.copy_(torch.arange(self.total_count, dtype=torch.int32))
        self.pool_avail = self.total_count - 1
        self._refs.fill(0)
        self._hashes.fill(UNREGISTERED)
        self._stamps.fill(0)
        self._parents.fill(-1)
        self._children.fill(0)
        self.kv_hash_to_block_id.clear()
        self._twins.clear()
        self.digests = [None] * self.total_count
        self._leaves.clear()
        self._evictable = 0

    def check_integrity(self) -> None:
        """Assert the allocator's invariants; O(pool size).

        Raises:
            AssertionError: which invariant broke, and for which block.
        """
        free = self._bag[: self.pool_avail].tolist()
        assert len(set(free)) == len(free), "a block is on the free stack twice"
        assert self.dummy_block_idx not in free, "the dummy block is on the free stack"
        if not self.enable_prefix_caching:
            return
        registered = np.flatnonzero(self._hashes != UNREGISTERED).tolist()
        held = np.flatnonzero(self._refs > 0).tolist()
        cached = [block for block in registered if self._refs[block] == 0]
        assert (self._refs >= 0).all(), "a reference count is negative"
        assert not set(free) & set(held), "a free block is held"
        assert not set(free) & set(registered), "a free block has a hash"
        assert self.pool_avail + len(held) + len(cached) == self.total_count - 1, "a block is lost"
        assert self._evictable == len(cached), f"evictable count {self._evictable}, but {len(cached)} are cached"
        carried = Counter(self._hashes[registered].tolist())
        assert set(carried) == set(self.kv_hash_to_block_id), "hash map and block hashes differ"
        for block_hash, block in self.kv_hash_to_block_id.items():
            assert self._hashes[block] == block_hash, f"the map leads hash {block_hash} to block {block}"
            assert carried[block_hash] == 1 + len(self._twins.get(block_hash, ())), "twins miscounted"
        children: Counter[int] = Counter()
        for block in registered:
            parent = int(self._parents[block])
            if parent >= 0:
                assert self._hashes[parent] != UNREGISTERED, f"block {block} outlived its parent {parent}"
                children[parent] += 1
        for block in range(self.total_count):
            assert self._children[block] == children[block], f"child count of block {block} is wrong"
        if self.is_lru:
            leaves = {block for block in cached if children[block] == 0}
            assert leaves == {block for block in cached if block in self._leaves}, "eviction order lost a leaf"
            assert len(self._leaves) == len(leaves), "eviction order keeps a block that is no leaf"

    # -- internals -------------------------------------------------------------------------------------------------

    def _is_cached(self, block: int) -> bool:
        return self._ref_at[block] == 0 and self._hash_at[block] != UNREGISTERED

    def _note_if_leaf(self, block: int) -> None:
        if self.is_lru and self._child_at[block] == 0 and self._is_cached(block):
            self._leaves.add(block, self._stamp_at[block])

    def _push(self, blocks: Sequence[int]) -> None:
        count = len(blocks)
        self._bag[self.pool_avail : self.pool_avail + count] = blocks
        self.pool_avail += count

    def _forget_hashes(self, blocks: Sequence[int]) -> set[int]:
        """Clear hash, parent and children links; return the hashes that no other block carries."""
        gone: set[int] = set()
        for block in blocks:
            block_hash = self._hash_at[block]
            if block_hash == UNREGISTERED:
                continue
            if self._ref_at[block] == 0:
                self._evictable -= 1
                self._leaves.discard(block)
            self._hash_at[block] = UNREGISTERED
            self.digests[block] = None
            if self._drop_from_map(block, block_hash):
                gone.add(block_hash)
            parent = self._parent_at[block]
            self._parent_at[block] = -1
            if parent >= 0:
                self._child_at[parent] -= 1
                self._note_if_leaf(parent)
        for block in blocks:
            if self._child_at[block]:
                self._orphan_children(block)
        return gone

    def _forget_evicted(self, blocks: list[int]) -> None:
        """Deregister blocks that eviction has chosen: unheld, children first, out of the eviction order already."""
        index = np.array(blocks, dtype=np.intp)
        hashes = self._hashes[index].tolist()
        if self._twins:
            gone = {h for block, h in zip(blocks, hashes, strict=True) if self._drop_from_map(block, h)}
        else:
            gone = set(hashes)
            for block_hash in hashes:
                del self.kv_hash_to_block_id[block_hash]
        for block in blocks:
            self.digests[block] = None
        parents = self._parents[index]
        np.subtract.at(self._children, parents[parents >= 0], 1)
        self._hashes[index] = UNREGISTERED
        self._parents[index] = -1
        self._stamps[index] = 0
        self._evictable -= len(blocks)
        self._push(blocks)
        self._tell(blocks, gone)

    def _orphan_children(self, block: int) -> None:
        """Make the children of a block that has gone roots; only blocks registered out of order come here."""
        self._parents[self._parents == block] = -1
        self._child_at[block] = 0

    def _drop_from_map(self, block: int, block_hash: int) -> bool:
        """Remove one carrier of a hash; True if it was the last.  A twin takes the map entry over."""
        twins = self._twins.get(block_hash)
        if twins is None:
            del self.kv_hash_to_block_id[block_hash]
            return True
        if self.kv_hash_to_block_id[block_hash] == block:
            self.kv_hash_to_block_id[block_hash] = twins.pop()
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]
        return False

    def _tell(self, blocks: list[int], hashes: set[int]) -> None:
        if blocks:
            for observer in list(self._observers):
                observer(list(blocks), hashes)
