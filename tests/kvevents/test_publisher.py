"""The publisher keeps the truth whatever happens to its messages, and its messages replayed are the truth."""

import threading

import pytest

from kvevents.block_set import BlockSet
from kvevents.messages import Removed, Stored, Tier, decode_events, decode_message, unpack_hashes
from kvevents.publisher import EventPublisher
from kvevents.types import SourceId

from .support import BLOCK, MODEL, Engine, new_engine


def replayed(messages: list[bytes]) -> BlockSet:
    """What a consumer of these messages holds; count and digest are checked after each."""
    view = BlockSet()
    for data in messages:
        message = decode_message(data)
        for event in decode_events(message):
            if isinstance(event, Stored):
                view.store(unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), event.tier)
            elif isinstance(event, Removed):
                view.remove(unpack_hashes(event.engine_hashes), event.tier)
            else:
                view.clear()
        assert (message.blocks, message.digest) == (len(view), view.digest)
    return view


def drained(publisher: EventPublisher) -> list[bytes]:
    return list(iter(publisher.take, None))


def test_its_messages_replayed_are_its_truth() -> None:
    engine = new_engine(seed=1)
    engine.churn(50)
    view = replayed(drained(engine.publisher))
    assert set(view.device_hashes().tolist()) == engine.truth()
    engine.publisher.check_integrity()


def test_a_step_is_one_message_and_seq_counts_from_one() -> None:
    engine = new_engine()
    first = engine.store(2)
    engine.store(1, first[-1])
    engine.remove([engine.store(1, first[0])[0]])
    engine.publisher.end_step()
    engine.publisher.end_step()
    engine.store(1)
    engine.publisher.end_step()
    messages = [decode_message(data) for data in drained(engine.publisher)]
    assert [(message.seq, len(message.events)) for message in messages] == [(1, 4), (2, 1)]


def test_the_order_of_a_step_is_kept_when_a_block_is_stored_removed_and_stored_again() -> None:
    engine = new_engine()
    payload = {
        "block_hashes": [5],
        "token_ids": [1] * BLOCK,
        "num_block_tokens": [BLOCK],
        "parent_hash": None,
    }
    engine.publisher.listener("stored", payload)
    engine.publisher.listener("removed", {"block_hashes": [5]})
    engine.publisher.listener("stored", payload)
    engine.publisher.end_step()
    assert len(replayed(drained(engine.publisher))) == 1


def test_a_full_queue_drops_messages_and_not_truth() -> None:
    engine = new_engine(queue_messages=3)
    engine.churn(10)
    publisher = engine.publisher
    assert (publisher.queued, publisher.dropped, publisher.messages) == (3, 7, 10)
    assert set(publisher.snapshot().blocks.device_hashes().tolist()) == engine.truth()
    assert len(publisher.events_since(publisher.epoch, 0) or []) == 10


def test_events_since_gives_what_the_ring_holds_and_nothing_otherwise() -> None:
    engine = new_engine(epoch=9, ring_messages=4)
    engine.churn(6)
    since = engine.publisher.events_since
    assert [decode_message(data).seq for data in since(9, 2) or []] == [3, 4, 5, 6]
    assert since(9, 6) == []
    assert since(9, 1) is None
    assert since(9, 7) is None
    assert since(8, 2) is None


def test_the_ring_is_bounded_in_bytes() -> None:
    engine = new_engine(ring_bytes=2000)
    engine.churn(40)
    kept = engine.publisher.events_since(engine.publisher.epoch, 40 - 1)
    assert kept is not None
    assert sum(map(len, engine.publisher.events_since(engine.publisher.epoch, 40 - len(kept)) or [])) <= 2000
    engine.publisher.check_integrity()


@pytest.mark.parametrize("max_payload", [2048, 16 * 1024, 1024 * 1024])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_no_message_exceeds_what_the_bus_carries(max_payload: int, block_size: int) -> None:
    engine = Engine(EventPublisher(SourceId("w", 0), MODEL, block_size))
    engine.publisher.fit(max_payload)
    blocks = engine.store(20_000 // block_size)
    engine.remove(blocks[::-1])
    engine.store(5)
    engine.publisher.end_step()
    messages = drained(engine.publisher)
    assert max(map(len, messages)) <= max_payload
    assert set(replayed(messages).device_hashes().tolist()) == engine.truth()


def test_parents_come_first_in_a_snapshot() -> None:
    engine = new_engine(seed=3)
    engine.churn(40)
    ((_, order, _),) = engine.publisher.snapshot().blocks.members()
    place = {h: i for i, h in enumerate(order.tolist())}
    assert all(parent is None or place[parent] < place[h] for h, parent in engine.parent.items())


def test_a_cleared_cache_is_empty_with_a_zero_digest() -> None:
    engine = new_engine()
    engine.store(4)
    engine.clear()
    engine.publisher.end_step()
    state = engine.publisher.state()
    assert (state.seq, state.blocks, state.digest) == (1, 0, 0)


def test_state_told_within_a_step_stands_for_a_message() -> None:
    engine = new_engine()
    engine.store(2)
    state = engine.publisher.state()
    message = decode_message(drained(engine.publisher)[0])
    assert (state.seq, state.blocks, state.digest) == (message.seq, message.blocks, message.digest)


def test_token_ids_travel_unless_configured_off() -> None:
    for send in (True, False):
        engine = Engine(EventPublisher(SourceId("w", 0), MODEL, BLOCK, send_tokens=send))
        engine.store(2)
        engine.publisher.end_step()
        (event,) = decode_events(decode_message(drained(engine.publisher)[0]))
        assert isinstance(event, Stored)
        assert (event.tier, event.tokens is not None and len(event.tokens)) == (Tier.DEVICE, send and 4 * 2 * BLOCK)


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("moved", {}, "kind"),
        ("stored", {"block_hashes": [1], "token_ids": [1], "parent_hash": None}, "token_count"),
        ("stored", {"block_hashes": [1, 1], "token_ids": [1] * 2 * BLOCK, "parent_hash": None}, "duplicate_hash"),
        ("stored", {"block_hashes": [1], "token_ids": [1] * BLOCK, "parent_hash": 77}, "unknown_parent"),
        ("stored", {"block_hashes": [1], "token_ids": [1] * BLOCK, "parent_hash": 1}, "unknown_parent"),
        ("stored", {"block_hashes": [-1], "token_ids": [1] * BLOCK, "parent_hash": None}, "block_hashes"),
        ("stored", {"block_hashes": [1], "token_ids": [-1] * BLOCK, "parent_hash": None}, "tokens"),
        ("stored", {"block_hashes": [1], "token_ids": [1] * BLOCK}, "parent_hash"),
        ("removed", {}, "block_hashes"),
        ("removed", {"block_hashes": ["x"]}, "block_hashes"),
    ],
)
def test_what_an_engine_gets_wrong_is_refused_counted_and_changes_nothing(
    kind: str, payload: dict[str, object], reason: str
) -> None:
    engine = new_engine()
    engine.store(2)
    before = engine.publisher.state()
    with pytest.raises(ValueError):
        engine.publisher.listener(kind, payload)
    assert engine.publisher.rejected == {reason: 1}
    assert engine.publisher.state() == before


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        EventPublisher(SourceId("w", 0), MODEL, 0)
    with pytest.raises(ValueError, match="epoch is 0"):
        EventPublisher(SourceId("w", 0), MODEL, 1, epoch=0)


def test_snapshots_from_another_thread_are_of_one_moment() -> None:
    engine = new_engine(seed=4)
    stop, failures = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            state, blocks = engine.publisher.snapshot()
            try:
                blocks.check_integrity()
                assert (state.blocks, state.digest) == (len(blocks), blocks.digest)
            except AssertionError as error:
                failures.append(error)
                return

    reader = threading.Thread(target=look)
    reader.start()
    engine.churn(300)
    stop.set()
    reader.join()
    assert failures == []
    view = replayed(drained(engine.publisher))
    assert set(view.device_hashes().tolist()) == engine.truth()
