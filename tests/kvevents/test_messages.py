"""The wire: what is written is read back, versions are told apart, and no bytes raise anything but a rejection."""

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import control
from kvevents.messages import (
    Cleared,
    Event,
    RejectedMessage,
    Removed,
    Stored,
    decode_events,
    decode_message,
    encode_event,
    encode_message,
    pack_hashes,
    unpack_hashes,
)
from kvevents.types import Beat, Load, SourceBeat, decode_beat, encode_beat

U64 = st.integers(0, 2**64 - 1)
HASHES = st.lists(U64, max_size=20).map(lambda numbers: pack_hashes(np.array(numbers, dtype=np.uint64)))
EVENT = st.one_of(
    st.builds(
        Stored,
        parent=st.none() | U64,
        engine_hashes=HASHES,
        sequence_hashes=HASHES,
        block_size=st.integers(1, 4096),
        tier=st.integers(0, 3),
        lora=st.text(max_size=5),
        salt=st.text(max_size=5),
        tokens=st.none() | st.binary(max_size=40),
    ),
    st.builds(Removed, engine_hashes=HASHES, tier=st.integers(0, 3)),
    st.just(Cleared()),
)


@given(st.integers(1, 2**64 - 1), st.integers(1, 2**63), st.lists(EVENT, max_size=5), st.integers(0, 2**40), U64)
def test_a_message_is_read_as_it_was_written(
    epoch: int, seq: int, events: list[Event], blocks: int, digest: int
) -> None:
    message = decode_message(encode_message(epoch, seq, 1.5, [encode_event(e) for e in events], blocks, digest))
    assert (message.epoch, message.seq, message.blocks, message.digest) == (epoch, seq, blocks, digest)
    assert decode_events(message) == events


@given(st.lists(U64, max_size=50))
def test_packed_hashes_are_little_endian_and_come_back(numbers: list[int]) -> None:
    packed = pack_hashes(np.array(numbers, dtype=np.uint64))
    assert packed == b"".join(number.to_bytes(8, "little") for number in numbers)
    assert unpack_hashes(packed).tolist() == numbers


def test_hashes_cut_in_the_middle_are_refused() -> None:
    with pytest.raises(RejectedMessage) as caught:
        unpack_hashes(b"1234567")
    assert caught.value.reason == "packed_length"


@pytest.mark.parametrize(
    "parts", [[2, 1, 1, 0.0, [], 0, 0], [2, "another shape"], [99, {"a": 1}]], ids=["same shape", "short", "map"]
)
def test_another_major_version_is_refused_by_name(parts: list[object]) -> None:
    with pytest.raises(RejectedMessage, match=f"version {parts[0]} is unknown") as caught:
        decode_message(msgspec.msgpack.encode(parts))
    assert caught.value.reason == "version"


def test_fields_of_a_newer_minor_version_are_skipped() -> None:
    stored = msgspec.msgpack.decode(encode_event(Stored(None, b"a" * 8, b"b" * 8, 16)))
    parts = [1, 5, 6, 0.0, [[*stored, "new", {"x": 1}]], 1, 2, "a new field"]
    message = decode_message(msgspec.msgpack.encode(parts))
    assert decode_events(message) == [Stored(None, b"a" * 8, b"b" * 8, 16)]


def test_an_event_of_an_unknown_kind_rejects_its_message_and_says_why() -> None:
    message = decode_message(msgspec.msgpack.encode([1, 1, 1, 0.0, [["moved", 1]], 0, 0]))
    with pytest.raises(RejectedMessage, match="moved") as caught:
        decode_events(message)
    assert caught.value.reason == "event"


@pytest.mark.parametrize("field", [(1, 0), (1, -1), (2, 0), (5, -1), (6, -1)])
def test_numbers_out_of_range_are_refused(field: tuple[int, int]) -> None:
    parts: list[object] = [1, 1, 1, 0.0, [], 0, 0]
    parts[field[0]] = field[1]
    with pytest.raises(RejectedMessage) as caught:
        decode_message(msgspec.msgpack.encode(parts))
    assert caught.value.reason == "range"


BEAT = Beat(1, "w", "m", "http://a", 16, 10, 99, "f", "ready", 1.0, [SourceBeat(0, 1, 2, 3, 4, Load(0, 0, 0, 0, 0, 0))])


def test_a_heartbeat_is_read_as_it_was_written_and_new_fields_are_skipped() -> None:
    assert decode_beat(encode_beat(BEAT)) == BEAT
    assert decode_beat(msgspec.msgpack.encode([*msgspec.msgpack.decode(encode_beat(BEAT)), "new"])) == BEAT


SAMPLES = [
    encode_message(7, 3, 1.0, [encode_event(Stored(None, b"a" * 16, b"b" * 16, 16)), encode_event(Cleared())], 1, 2),
    encode_message(7, 4, 1.0, [encode_event(Removed(b"a" * 16))], 1, 2),
    encode_beat(BEAT),
    control.encode(control.EventsSince(1, 7, 3)),
    control.encode(control.SnapshotChunk(1, "s", 2)),
    control.encode(control.Events([b"abc", b"def"], more=True)),
    control.encode(control.SnapshotPart("s", 7, 3, 1, 2, 0, 1, 0, b"a" * 8, b"b" * 8)),
    control.encode(control.TooOld(7, 3)),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real message with some bytes changed, put in or cut out."""
    data = bytearray(draw(st.sampled_from(SAMPLES)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["set", "insert", "cut", "truncate"]))
        if kind == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 8))]
        else:
            del data[at:]
    return bytes(data)


@given(st.one_of(st.binary(max_size=200), mutated()))
def test_no_bytes_raise_anything_but_a_rejection(data: bytes) -> None:
    with contextlib.suppress(RejectedMessage):
        for event in decode_events(decode_message(data)):
            if isinstance(event, Stored | Removed):
                unpack_hashes(event.engine_hashes)
    with contextlib.suppress(msgspec.DecodeError):
        decode_beat(data)
    with contextlib.suppress(ValueError):
        control.decode_request(data)
    with contextlib.suppress(ValueError):
        control.decode_reply(data)


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xffa"])
def test_hostile_lengths_and_depths_are_refused(data: bytes) -> None:
    with pytest.raises(RejectedMessage):
        decode_message(data)
    with pytest.raises(ValueError):
        control.decode_request(data)


def test_a_control_request_of_another_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="version 2 is unknown"):
        control.decode_request(control.encode(control.EventsSince(2, 1, 1)))
