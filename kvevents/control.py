"""What a consumer asks a source on `kv.v1.control.<worker>.<rank>`, and what it answers."""

from __future__ import annotations

import msgspec

from kvevents.types import PROTOCOL_VERSION


class EventsSince(msgspec.Struct, array_like=True, tag="events_since"):
    """Give me the messages of `epoch` after `seq`."""

    version: int
    epoch: int
    seq: int


class SnapshotChunk(msgspec.Struct, array_like=True, tag="snapshot"):
    """Give me part `chunk` of the snapshot `snapshot` (0 and an empty name begin a new one)."""

    version: int
    snapshot: str
    chunk: int


Request = EventsSince | SnapshotChunk


class Events(msgspec.Struct, array_like=True, tag="events"):
    """Encoded messages in order of seq; `more` says that later ones did not fit."""

    messages: list[bytes]
    more: bool


class TooOld(msgspec.Struct, array_like=True, tag="too_old"):
    """The ring no longer holds what was asked for, or the epoch is another: take a snapshot."""

    epoch: int
    seq: int


class SnapshotPart(msgspec.Struct, array_like=True, tag="part"):
    """A piece of one tier; parts of one snapshot are of one moment: after message `seq` of `epoch`."""

    snapshot: str
    epoch: int
    seq: int
    blocks: int
    digest: int
    chunk: int
    chunks: int
    tier: int
    engine_hashes: bytes
    sequence_hashes: bytes


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The request can't be answered; the text says why and what to do."""

    reason: str
    detail: str


Reply = Events | TooOld | SnapshotPart | Refused

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Read a request.

    Raises:
        ValueError: it is none, or of another version.
    """
    try:
        request = _request_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a control request: {error}") from None
    if request.version != PROTOCOL_VERSION:
        raise ValueError(f"control version {request.version} is unknown; this side speaks {PROTOCOL_VERSION}")
    return request


def decode_reply(data: bytes) -> Reply:
    """Read a reply.

    Raises:
        ValueError: it is none.
    """
    try:
        return _reply_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a control reply: {error}") from None
