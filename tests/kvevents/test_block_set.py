"""A block set against plain Python: members, held hashes, count and digest stay true under any sequence of changes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvevents.block_set import BlockSet
from kvevents.digest import digest_of, digest_of_one

SMALL = st.integers(0, 12)
CHANGE = st.one_of(
    st.tuples(st.just("store"), st.lists(st.tuples(SMALL, SMALL), max_size=6), st.integers(0, 1)),
    st.tuples(st.just("remove"), st.lists(SMALL, max_size=6), st.integers(0, 1)),
    st.tuples(st.just("clear"), st.just([]), st.just(0)),
)


def u64(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


@given(st.lists(CHANGE, max_size=25))
def test_any_changes_leave_what_plain_dictionaries_hold(changes: list[tuple[str, list, int]]) -> None:
    blocks, plain, followed = BlockSet(), {}, set()
    for kind, items, tier in changes:
        if kind == "store":
            change = blocks.store(u64([e for e, _ in items]), u64([s for _, s in items]), tier)
            plain.update({(tier, e): s for e, s in items})
        elif kind == "remove":
            change = blocks.remove(u64(items), tier)
            for e in items:
                plain.pop((tier, e), None)
        else:
            blocks.clear()
            plain.clear()
            followed.clear()
            continue
        followed |= set(change.added.tolist())
        followed -= set(change.removed.tolist())
        blocks.check_integrity()
        held = {s for (where, _), s in plain.items() if where == 0}
        assert set(blocks.device_hashes().tolist()) == held == followed
        assert len(blocks) == len(plain)
        assert blocks.digest == sum(digest_of_one(e, where) for where, e in plain) % 2**64


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30, unique=True), st.integers(0, 255))
def test_the_compiled_digest_equals_the_plain_one_in_any_order(hashes: list[int], tier: int) -> None:
    expected = sum(digest_of_one(h, tier) for h in hashes) % 2**64
    assert digest_of(u64(hashes), tier) == digest_of(u64(hashes[::-1]), tier) == expected


def test_the_digest_tells_tiers_apart_and_near_hashes_far() -> None:
    assert digest_of_one(1, 0) != digest_of_one(1, 1)
    bits = [bin(digest_of_one(h) ^ digest_of_one(h ^ 1)).count("1") for h in range(256)]
    assert min(bits) > 12
    assert 30 < sum(bits) / len(bits) < 34


def test_a_hash_that_two_blocks_name_is_held_until_the_second_goes() -> None:
    blocks = BlockSet()
    blocks.store(u64([1, 2]), u64([7, 7]))
    assert blocks.remove(u64([1])).removed.tolist() == []
    assert blocks.remove(u64([2])).removed.tolist() == [7]


def test_an_absent_block_does_not_stop_the_rest_of_a_removal() -> None:
    blocks = BlockSet()
    blocks.store(u64([1, 2]), u64([11, 12]))
    assert blocks.remove(u64([99, 2, 98, 1])).removed.tolist() == [12, 11]
    assert (len(blocks), blocks.digest) == (0, 0)


def test_a_copy_is_independent() -> None:
    blocks = BlockSet()
    blocks.store(u64([1]), u64([11]))
    twin = blocks.copy()
    blocks.remove(u64([1]))
    twin.check_integrity()
    assert twin.device_hashes().tolist() == [11]
    twin.store(u64([2]), u64([12]))
    twin.check_integrity()
    assert len(blocks) == 0


def test_members_come_in_the_order_in_which_they_were_stored() -> None:
    blocks = BlockSet()
    for h in (5, 3, 9, 1):
        blocks.store(u64([h]), u64([h + 100]))
    blocks.remove(u64([9]))
    ((tier, engine, sequence),) = blocks.members()
    assert (tier, engine.tolist(), sequence.tolist()) == (0, [5, 3, 1], [105, 103, 101])
