"""The prefix index answers like plain sets, whatever the order of stores, removals, swaps, drops, growth
and upkeep.
"""

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.index.catalog import IndexCatalog, IndexKey
from router.index.prefix_index import PrefixIndex

from .plain_index import PlainIndex

EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "40"))


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def chain(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**64, length, dtype=np.uint64)


EDGE_KEYS = [0, 1, 2**64 - 1, 2**63]
hash_lists = st.lists(st.one_of(st.sampled_from(EDGE_KEYS), st.integers(0, 60)), max_size=30)


class IndexAgainstSets(RuleBasedStateMachine):
    """Random operations on the index and on plain sets; after each the index must agree with itself and
    with the sets.
    """

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex()
        self.plain = PlainIndex()

    def pick(self, data: st.DataObject) -> int | None:
        handles = sorted(self.plain.held)
        return data.draw(st.sampled_from(handles)) if handles else None

    @rule(count=st.integers(1, 40))
    def add_sources(self, count: int) -> None:
        for _ in range(count if len(self.plain.held) < 150 else 0):
            self.plain.held[self.index.add_source()] = set()

    @rule(data=st.data(), hashes=hash_lists)
    def store(self, data: st.DataObject, hashes: list[int]) -> None:
        if (source := self.pick(data)) is not None:
            self.index.store(source, u64(hashes))
            self.plain.store(source, hashes)

    @rule(data=st.data(), first=st.integers(100, 10**6), length=st.integers(500, 6000))
    def store_many(self, data: st.DataObject, first: int, length: int) -> None:
        if (source := self.pick(data)) is not None:
            hashes = list(range(first, first + length))
            self.index.store(source, u64(hashes))
            self.plain.store(source, hashes)

    @rule(data=st.data(), hashes=hash_lists)
    def remove(self, data: st.DataObject, hashes: list[int]) -> None:
        if (source := self.pick(data)) is not None:
            self.index.remove(source, u64(hashes))
            self.plain.remove(source, hashes)

    @rule(data=st.data(), keep=st.integers(0, 50))
    def remove_nearly_all(self, data: st.DataObject, keep: int) -> None:
        if (source := self.pick(data)) is not None:
            hashes = sorted(self.plain.held[source])[keep:]
            self.index.remove(source, u64(hashes))
            self.plain.remove(source, hashes)

    @rule(data=st.data(), hashes=hash_lists)
    def replace(self, data: st.DataObject, hashes: list[int]) -> None:
        if (source := self.pick(data)) is not None:
            self.index.replace(source, u64(hashes))
            self.plain.replace(source, hashes)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if (source := self.pick(data)) is not None:
            self.index.drop(source)
            self.plain.drop(source)

    @rule(slots=st.integers(1, 5000))
    def upkeep(self, slots: int) -> None:
        self.index.upkeep(slots)

    @rule(hashes=hash_lists)
    def match(self, hashes: list[int]) -> None:
        assert self.index.match(u64(hashes)).as_dict() == self.plain.match(hashes)

    @rule(data=st.data(), length=st.integers(1, 200))
    def match_resident(self, data: st.DataObject, length: int) -> None:
        if (source := self.pick(data)) is not None:
            hashes = sorted(self.plain.held[source])[:length]
            assert self.index.match(u64(hashes)).as_dict() == self.plain.match(hashes)

    @invariant()
    def consistent(self) -> None:
        self.index.check_integrity()
        assert self.index.worker_blocks == sum(map(len, self.plain.held.values()))


IndexAgainstSets.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
TestIndexAgainstSets = IndexAgainstSets.TestCase


def test_prefix_stops_at_a_hole_left_by_eviction_in_the_middle() -> None:
    index, prompt = PrefixIndex(), chain(1, 10)
    whole, holed = index.add_source(), index.add_source()
    index.store(whole, prompt)
    index.store(holed, prompt)
    index.remove(holed, prompt[4:5])
    assert index.match(prompt).as_dict() == {whole: 10, holed: 4}


def test_the_same_block_stored_twice_is_one_block_and_one_removal_ends_it() -> None:
    index, prompt = PrefixIndex(), chain(2, 5)
    source = index.add_source()
    index.store(source, prompt)
    index.store(source, np.concatenate([prompt, prompt]))
    assert index.blocks_of(source) == 5
    index.remove(source, prompt)
    assert index.blocks_of(source) == 0
    assert index.match(prompt).as_dict() == {}


def test_an_absent_block_does_not_stop_the_removal_of_the_others() -> None:
    index, prompt = PrefixIndex(), chain(3, 3)
    source = index.add_source()
    index.store(source, prompt)
    index.remove(source, np.concatenate([chain(4, 2), prompt[:1]]))
    assert sorted(index.hashes_of(source).tolist()) == sorted(prompt[1:].tolist())


def test_a_thousand_sources_are_matched_each_at_its_own_depth() -> None:
    index, prompt = PrefixIndex(), chain(5, 1024)
    handles = [index.add_source() for _ in range(1024)]
    for depth, handle in enumerate(handles):
        index.store(handle, prompt[:depth])
    assert index.match(prompt).as_dict() == {handle: depth for depth, handle in enumerate(handles) if depth}
    index.check_integrity()


def test_replace_never_shows_a_mixture_and_frees_what_it_replaced() -> None:
    index, before, after = PrefixIndex(), chain(6, 9000), chain(7, 20)
    source = index.add_source()
    index.store(source, before)
    index.replace(source, after)
    assert index.match(before).as_dict() == {}
    assert index.match(after).as_dict() == {source: 20}
    while index.upkeep():
        index.check_integrity()
    assert index.worker_blocks == 20
    assert index.nbytes < 32 * 1024


def test_churn_of_sources_and_blocks_leaves_no_memory_behind() -> None:
    index = PrefixIndex()
    for round_number in range(300):
        source = index.add_source()
        index.store(source, chain(round_number, 2000))
        index.remove(source, chain(round_number, 1000))
        index.drop(source)
        while index.upkeep():
            pass
    assert index.worker_blocks == 0
    assert index.nbytes < 32 * 1024
    index.check_integrity()


def test_wrong_dtype_is_refused_with_the_remedy() -> None:
    index = PrefixIndex()
    source = index.add_source()
    with pytest.raises(TypeError, match="uint64"):
        index.store(source, np.arange(3))  # type: ignore[arg-type]


def test_block_sizes_and_models_never_share_an_index() -> None:
    catalog, prompt = IndexCatalog(), chain(8, 4)
    sixteen = catalog.open("a/0", "m", 16)
    catalog.open("a/0", "m", 64)
    catalog.store(sixteen, prompt)
    assert catalog.match(IndexKey("m", 16), prompt).as_dict() == {sixteen: 4}
    assert catalog.match(IndexKey("m", 64), prompt).as_dict() == {}
    assert catalog.match(IndexKey("other", 16), prompt).as_dict() == {}


def test_writes_for_a_dropped_source_are_counted_and_not_applied() -> None:
    catalog, prompt = IndexCatalog(), chain(9, 4)
    old = catalog.open("a/0", "m", 16)
    catalog.drop(old)
    new = catalog.open("a/0", "m", 16)
    catalog.store(old, prompt)
    catalog.remove(old, prompt)
    catalog.replace(old, prompt)
    assert catalog.late_writes == 3
    assert catalog.match(IndexKey("m", 16), prompt).as_dict() == {}
    assert catalog.blocks_of(new) == 0
