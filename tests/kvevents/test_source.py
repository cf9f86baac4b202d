"""Each transition of the source state machine, one sentence a test."""

import numpy as np
import pytest

from kvevents.messages import Message, Stored, decode_message, encode_event, encode_message
from kvevents.publisher import EventPublisher
from kvevents.source import Source, State, Trust
from kvevents.types import SourceBeat, SourceId

from .support import BLOCK, MODEL, Engine, SetSink, new_engine, source_beat


class Following:
    """An engine, and a source that follows it by what the test lets through."""

    def __init__(self, epoch: int = 100) -> None:
        self.sink, self.now = SetSink(), 0.0
        self.engine = new_engine(epoch=epoch)
        self.source = Source(SourceId("w.1", 0), MODEL, BLOCK, self.sink, lease_s=3.0)

    @property
    def publisher(self) -> EventPublisher:
        return self.engine.publisher

    @property
    def view(self) -> set[int]:
        return self.sink.sets[self.source.handle]

    def step(self, blocks: int = 2) -> Message:
        """One engine step; its message is returned and not delivered."""
        self.engine.store(blocks)
        self.publisher.end_step()
        data = self.publisher.take()
        assert data is not None
        return decode_message(data)

    def hear(self, *messages: Message) -> None:
        for message in messages:
            self.source.hear(message, self.now)
            self.source.check_integrity()

    def beat(self, beat: SourceBeat | None = None) -> None:
        self.source.beat(beat or source_beat(self.publisher), self.now)
        self.source.check_integrity()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.source.tick(self.now)
        self.source.check_integrity()

    def snapshot(self) -> bool:
        state, blocks = self.publisher.snapshot()
        done = self.source.repaired_by_snapshot(blocks, state.epoch, state.seq, self.now)
        self.source.check_integrity()
        return done

    def events_since(self) -> bool:
        data = self.publisher.events_since(self.source.epoch, self.source.seq)
        assert data is not None
        done = self.source.repaired_by_events([decode_message(one) for one in data], self.now)
        self.source.check_integrity()
        return done

    def restart(self, epoch: int) -> None:
        self.engine = new_engine(epoch=epoch, seed=epoch)

    def assert_exact(self) -> None:
        assert (self.source.state, self.source.trust) == (State.LIVE, Trust.EXACT)
        assert self.view == self.engine.truth()


@pytest.fixture
def live() -> Following:
    """A source in step after one message."""
    world = Following()
    world.beat()
    world.hear(world.step())
    world.assert_exact()
    return world


def test_nothing_is_known_before_first_contact() -> None:
    world = Following()
    assert (world.source.state, world.source.trust) == (State.UNKNOWN, Trust.FALLBACK)
    assert not world.source.needs_repair


def test_first_contact_with_an_empty_cache_is_live_at_once() -> None:
    world = Following()
    world.beat()
    world.assert_exact()


def test_first_contact_with_a_filled_cache_syncs_by_snapshot_and_keeps_what_arrives_meanwhile() -> None:
    world = Following()
    world.step()
    world.beat()
    assert (world.source.state, world.source.trust) == (State.SYNCING, Trust.FALLBACK)
    assert world.source.wants_snapshot
    state, blocks = world.publisher.snapshot()
    world.hear(world.step())
    assert world.source.repaired_by_snapshot(blocks, state.epoch, state.seq, world.now)
    world.assert_exact()


def test_the_first_message_of_an_incarnation_is_all_of_its_truth() -> None:
    world = Following()
    world.hear(world.step())
    world.assert_exact()


def test_messages_in_order_are_applied(live: Following) -> None:
    live.hear(live.step(), live.step(), live.step())
    live.assert_exact()
    assert live.source.counters.applied == 4


def test_a_duplicate_is_dropped_by_seq(live: Following) -> None:
    message = live.step()
    live.hear(message, message)
    live.assert_exact()
    assert live.source.counters.rejected == {"duplicate": 1}


def test_messages_out_of_order_wait_a_moment_and_are_applied_in_order(live: Following) -> None:
    one, two, three = live.step(), live.step(), live.step()
    live.hear(three)
    assert (live.source.state, live.source.trust, live.source.lag) == (State.LIVE, Trust.DEGRADED, 3)
    live.hear(two)
    live.tick(0.05)
    live.hear(one)
    live.assert_exact()
    assert live.source.gaps == 0


def test_a_hole_that_lasts_makes_suspect_and_events_since_repair_it_without_a_snapshot(live: Following) -> None:
    held = set(live.view)
    live.step()
    live.hear(live.step())
    live.tick(0.2)
    assert (live.source.state, live.source.trust, live.source.gaps) == (State.SUSPECT, Trust.DEGRADED, 1)
    assert live.view == held
    assert not live.source.wants_snapshot
    assert live.events_since()
    live.assert_exact()
    assert (live.source.repairs, live.source.counters.snapshots) == (1, 0)


def test_a_live_message_after_a_repair_needs_no_other_repair(live: Following) -> None:
    live.step()
    live.hear(live.step())
    live.tick(0.2)
    live.snapshot()
    live.hear(live.step())
    live.tick(1)
    live.assert_exact()
    assert (live.source.gaps, live.source.repairs) == (1, 1)


def test_a_message_that_was_merely_late_heals_a_suspect_source(live: Following) -> None:
    late = live.step()
    live.hear(live.step())
    live.tick(0.2)
    live.hear(late)
    live.assert_exact()
    assert live.source.repairs == 0


def test_a_heartbeat_ahead_of_the_view_becomes_a_gap_only_if_nothing_moves(live: Following) -> None:
    message = live.step()
    live.beat()
    assert (live.source.trust, live.source.lag) == (Trust.DEGRADED, 1)
    live.tick(0.05)
    live.hear(message)
    live.assert_exact()
    live.step()
    live.beat()
    live.tick(0.2)
    assert (live.source.state, live.source.gaps) == (State.SUSPECT, 1)
    assert live.events_since()
    live.assert_exact()


def test_a_view_that_lags_and_moves_is_not_a_gap(live: Following) -> None:
    messages = [live.step() for _ in range(10)]
    live.beat()
    for message in messages:
        live.tick(0.08)
        live.hear(message)
    live.assert_exact()
    assert live.source.gaps == 0


def test_a_wrong_digest_after_a_message_asks_for_a_snapshot_and_keeps_serving(live: Following) -> None:
    message = live.step()
    message.digest ^= 1
    held = set(live.view)
    live.hear(message)
    assert (live.source.state, live.source.wants_snapshot) == (State.SUSPECT, True)
    assert held <= live.view
    assert not live.events_since()
    assert live.snapshot()
    live.assert_exact()


def test_a_wrong_digest_of_a_heartbeat_asks_for_a_snapshot(live: Following) -> None:
    beat = source_beat(live.publisher)
    beat.digest ^= 1
    live.beat(beat)
    assert (live.source.state, live.source.wants_snapshot) == (State.SUSPECT, True)
    live.snapshot()
    live.assert_exact()


def test_a_wrong_count_is_as_bad_as_a_wrong_digest(live: Following) -> None:
    beat = source_beat(live.publisher)
    beat.blocks += 1
    live.beat(beat)
    assert live.source.state is State.SUSPECT


def test_a_reconnect_makes_suspect_and_an_empty_answer_makes_live_again(live: Following) -> None:
    live.source.distrust("the bus reconnected", live.now)
    assert live.source.state is State.SUSPECT
    assert live.events_since()
    live.assert_exact()


def test_a_new_incarnation_with_an_empty_cache_replaces_the_view_at_once(live: Following) -> None:
    live.restart(200)
    live.beat()
    live.assert_exact()
    assert (live.view, live.source.counters.restarts) == (set(), 1)


def test_a_new_incarnation_with_a_filled_cache_replaces_the_old_view_when_it_has_synced(live: Following) -> None:
    held = set(live.view)
    live.restart(200)
    live.step()
    live.beat()
    assert (live.source.state, live.source.trust, live.view) == (State.SYNCING, Trust.DEGRADED, held)
    assert live.snapshot()
    live.assert_exact()


def test_a_restart_whose_seq_looks_like_the_next_one_is_not_a_continuation(live: Following) -> None:
    live.restart(200)
    live.step()
    live.hear(live.step())
    assert (live.source.state, live.source.seq, live.source.epoch) == (State.SYNCING, 1, 100)


def test_late_messages_of_a_replaced_incarnation_are_ignored_and_counted(live: Following) -> None:
    late = live.step()
    live.restart(200)
    live.beat()
    live.hear(late)
    live.assert_exact()
    assert live.source.counters.rejected == {"late_epoch": 1}


def test_a_lower_epoch_counts_only_after_a_lease_of_silence_and_then_for_good(live: Following) -> None:
    late = live.step()
    live.restart(50)
    live.step()
    live.beat()
    assert live.source.epoch == live.source.newest_epoch == 100
    assert not live.source.needs_repair
    live.now += 3.5
    live.beat()
    assert live.source.newest_epoch == 50
    live.snapshot()
    live.assert_exact()
    live.hear(late)
    live.assert_exact()
    assert live.source.counters.rejected == {"late_epoch": 2}


def test_a_snapshot_older_than_the_view_is_refused(live: Following) -> None:
    state, blocks = live.publisher.snapshot()
    live.hear(live.step(), live.step())
    live.source.distrust("test", live.now)
    assert not live.source.repaired_by_snapshot(blocks, state.epoch, state.seq, live.now)
    assert not live.source.repaired_by_snapshot(blocks, state.epoch - 1, state.seq, live.now)
    assert live.snapshot()
    live.assert_exact()


def test_a_hole_among_the_buffered_messages_is_another_gap(live: Following) -> None:
    live.step()
    first = live.step()
    live.step()
    last = live.step()
    live.hear(first, last)
    live.tick(0.2)
    data = live.publisher.events_since(live.source.epoch, live.source.seq)
    assert data is not None
    assert live.source.repaired_by_events([decode_message(data[0])], live.now)
    assert (live.source.state, live.source.trust) == (State.LIVE, Trust.DEGRADED)
    live.tick(0.2)
    live.events_since()
    live.assert_exact()


def _message(source: Source, *events: Stored, seq: int | None = None) -> Message:
    packed = [encode_event(event) for event in events]
    return decode_message(encode_message(source.epoch, seq or source.seq + 1, 0.0, packed, 0, 0))


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Stored(None, b"a" * 8, b"b" * 8, BLOCK + 1), "block_size"),
        (Stored(None, b"a" * 8, b"b" * 16, BLOCK), "hash_count"),
        (Stored(None, b"a" * 9, b"b" * 9, BLOCK), "packed_length"),
        (Stored(None, b"a" * 8, b"b" * 8, BLOCK, -1), "tier"),
        (Stored(None, b"a" * 8, b"b" * 8, BLOCK, 2**63), "tier"),
    ],
)
def test_a_message_with_one_bad_event_is_applied_in_no_part(live: Following, event: Stored, reason: str) -> None:
    held = set(live.view)
    live.hear(_message(live.source, Stored(None, b"x" * 8, b"y" * 8, BLOCK), event))
    assert live.view == held
    assert live.source.counters.rejected == {reason: 1}
    assert (live.source.state, live.source.wants_snapshot) == (State.SUSPECT, True)
    live.snapshot()
    live.assert_exact()


def test_a_message_that_only_clears_empties_the_view(live: Following) -> None:
    live.engine.clear()
    live.publisher.end_step()
    live.hear(decode_message(live.publisher.take() or b""))
    live.assert_exact()
    assert live.view == set()


def test_other_tiers_are_counted_and_not_matched(live: Following) -> None:
    hashes = np.array([7], dtype="<u8").tobytes()
    live.hear(_message(live.source, Stored(None, hashes, hashes, BLOCK, 1)))
    assert 7 not in live.view
    assert live.source.blocks == 3


def test_the_buffer_is_bounded_and_what_does_not_fit_is_repaired(live: Following) -> None:
    live.step()
    for seq in range(3, 5000):
        live.source.hear(_message(live.source, seq=seq), live.now)
    assert live.source.counters.rejected["buffer_full"] == 4997 - 4096
    live.tick(0.2)
    assert live.source.state is State.SUSPECT


def test_a_source_that_left_hears_nothing(live: Following) -> None:
    live.source.leave(live.now)
    live.hear(live.step())
    live.beat()
    live.tick(1)
    assert live.source.state is State.GONE
    assert live.sink.sets == {}


def test_two_ranks_with_counters_of_their_own_have_no_gaps() -> None:
    sink = SetSink()
    engines = [Engine(EventPublisher(SourceId("w", rank), MODEL, BLOCK), rank) for rank in range(2)]
    sources = [Source(engine.publisher.source, MODEL, BLOCK, sink) for engine in engines]
    for _ in range(5):
        for engine, source in zip(engines, sources, strict=True):
            engine.churn(1 + engine.publisher.source.dp_rank)
            while data := engine.publisher.take():
                source.hear(decode_message(data), 0.0)
    for engine, source in zip(engines, sources, strict=True):
        assert sink.sets[source.handle] == engine.truth()
        assert (source.gaps, source.trust) == (0, Trust.EXACT)
