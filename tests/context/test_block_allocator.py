"""The allocator on its own: stack order, references, registration, eviction order, twins, observers."""

from __future__ import annotations

import pytest

from context import KVBlockAllocator, PrefixCachingEvictionPolicy

LRU, REF_ZERO = PrefixCachingEvictionPolicy.LRU, PrefixCachingEvictionPolicy.REF_ZERO


def allocator(pool: int = 9, policy: PrefixCachingEvictionPolicy = LRU, paused: int = 0) -> KVBlockAllocator:
    return KVBlockAllocator(pool, paused, enable_prefix_caching=True, policy=policy)


def cached_chain(pool: KVBlockAllocator, hashes: list[int]) -> list[int]:
    """Blocks registered as one chain and released, at the clock's present time."""
    blocks = pool.allocate_memory_blocks(len(hashes)).tolist()
    pool.register_kv_block_hashes(blocks, hashes, [0, *hashes[:-1]])
    pool.release_memory_blocks(blocks)
    pool.check_integrity()
    return blocks


def test_allocation_takes_the_top_of_the_stack_as_a_slice() -> None:
    pool = allocator()
    assert pool.allocate_memory_blocks(3).tolist() == [5, 6, 7]
    assert pool.pool_avail == 5
    assert pool.get_total_used() == 3


def test_more_than_there_is_changes_nothing() -> None:
    pool = allocator(policy=REF_ZERO)
    assert pool.allocate_memory_blocks(9) is None
    assert pool.pool_avail == 8


def test_a_block_released_more_often_than_held_is_a_bug() -> None:
    pool = allocator()
    blocks = pool.allocate_memory_blocks(1)
    pool.release_memory_blocks(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release_memory_blocks(blocks)


def test_references_count_per_occurrence() -> None:
    pool = allocator()
    block = int(pool.allocate_memory_blocks(1)[0])
    pool.retain([block, block])
    pool.release_memory_blocks([block, block])
    assert pool.block_ref_counts[block] == 1
    assert pool.pool_avail == 7


def test_ref_zero_forgets_a_block_with_its_last_reference() -> None:
    pool = allocator(policy=REF_ZERO)
    told: list[tuple[list[int], set[int]]] = []
    pool.add_deregistration_observer(lambda blocks, hashes: told.append((blocks, set(hashes))))
    blocks = cached_chain(pool, [11, 12])
    assert pool.kv_hash_to_block_id == {}
    assert pool.pool_avail == 8
    assert told == [(blocks, {11, 12})]


def test_lru_keeps_registered_blocks_and_frees_the_others() -> None:
    pool = allocator()
    blocks = pool.allocate_memory_blocks(2).tolist()
    pool.register_kv_block_hashes(blocks[:1], [11], [0])
    pool.release_memory_blocks(blocks)
    assert pool.get_evictable_block_count() == 1
    assert pool.pool_avail == 7
    assert pool.get_allocatable_count() == 8


def test_eviction_takes_the_oldest_leaf_and_never_a_parent_before_its_children() -> None:
    pool = allocator()
    old = cached_chain(pool, [11, 12, 13])
    pool.lru_clock += 1
    young = cached_chain(pool, [21, 22])
    order: list[int] = []
    pool.add_deregistration_observer(lambda blocks, hashes: order.extend(blocks))
    for _ in range(5):
        assert pool.evict_lru_blocks(1)
        pool.check_integrity()
    assert order == [*reversed(old), *reversed(young)]


def test_ties_in_age_go_by_block_id() -> None:
    pool = allocator()
    first, second = cached_chain(pool, [11]), cached_chain(pool, [21])
    order: list[int] = []
    pool.add_deregistration_observer(lambda blocks, hashes: order.extend(blocks))
    assert pool.evict_lru_blocks(2)
    assert order == sorted(first + second)


def test_a_held_child_keeps_its_parents_from_eviction() -> None:
    pool = allocator()
    blocks = cached_chain(pool, [11, 12, 13])
    pool.retain(blocks[:2])
    assert pool.get_evictable_block_count() == 1
    assert not pool.evict_lru_blocks(2)
    pool.check_integrity()
    assert pool.evict_lru_blocks(1)
    assert set(pool.kv_hash_to_block_id) == {11, 12}


def test_an_impossible_eviction_changes_nothing() -> None:
    pool = allocator()
    blocks = cached_chain(pool, [11, 12])
    # Held out of order, as no request would: the count promises what the tree can't give.
    pool.retain(blocks[1:])
    cached_chain(pool, [31])
    assert not pool.evict_lru_blocks(2)
    assert set(pool.kv_hash_to_block_id) == {11, 12, 31}


def test_availability_leaves_out_what_is_about_to_be_pinned() -> None:
    pool = allocator(pool=5)
    cached_chain(pool, [11, 12])
    pool.allocate_memory_blocks(2)
    assert pool.is_memory_available(2)
    assert not pool.is_memory_available(2, potential_matched_count=1)


def test_registering_the_same_pair_again_changes_nothing_and_another_hash_is_a_bug() -> None:
    pool = allocator()
    blocks = pool.allocate_memory_blocks(1)
    pool.register_kv_block_hashes(blocks, [11], [0])
    pool.register_kv_block_hashes(blocks, [11], [0])
    pool.check_integrity()
    with pytest.raises(AssertionError, match="registered under 11"):
        pool.register_kv_block_hashes(blocks, [12], [0])


def test_the_later_of_two_blocks_with_one_hash_takes_the_map_and_the_last_one_takes_it_away() -> None:
    pool = allocator()
    gone: list[int] = []
    pool.add_deregistration_observer(lambda blocks, hashes: gone.extend(hashes))
    first, second = pool.allocate_memory_blocks(2).tolist()
    pool.register_kv_block_hashes([first], [11], [0])
    pool.register_kv_block_hashes([second], [11], [0])
    assert pool.kv_hash_to_block_id[11] == second
    pool.unregister([second])
    assert pool.kv_hash_to_block_id[11] == first
    assert gone == []
    pool.unregister([first])
    assert gone == [11]
    pool.release_memory_blocks([first, second])
    pool.check_integrity()


def test_unregistered_blocks_keep_their_holders() -> None:
    pool = allocator()
    blocks = pool.allocate_memory_blocks(2).tolist()
    pool.register_kv_block_hashes(blocks, [11, 12], [0, 11])
    assert pool.unregister(blocks) == {11, 12}
    assert pool.block_ref_counts[blocks].tolist() == [1, 1]
    pool.release_memory_blocks(blocks)
    assert pool.pool_avail == 8
    pool.check_integrity()


def test_an_observer_that_was_removed_hears_nothing() -> None:
    pool = allocator()
    heard: list[object] = []

    def observer(blocks: list[int], hashes: set[int]) -> None:
        heard.append(blocks)

    pool.add_deregistration_observer(observer)
    pool.remove_deregistration_observer(observer)
    cached_chain(pool, [11])
    assert pool.evict_lru_blocks(1)
    assert heard == []


def test_a_pool_needs_a_block_besides_the_dummy() -> None:
    with pytest.raises(ValueError, match="pool_size is 1"):
        KVBlockAllocator(1)
