"""Block events on the wire: MessagePack arrays with hashes and tokens packed as little-endian bytes.

A message is `[version, epoch, seq, time, events, blocks, digest]`; `blocks` and `digest` describe the source's set
after it.  Fields that a newer minor version appends are skipped; another major version is refused.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvevents.types import PROTOCOL_VERSION


class Tier(enum.IntEnum):
    """Where a block lies; each tier is a set of its own."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    OTHER = 3


class Stored(msgspec.Struct, array_like=True, tag="s"):
    """Blocks that a source now holds, each the parent of the next."""

    parent: int | None
    """Engine hash of the first block's parent; None for a root."""
    engine_hashes: bytes
    sequence_hashes: bytes
    block_size: int
    tier: int = 0
    lora: str = ""
    salt: str = ""
    tokens: bytes | None = None
    """u32 token ids of all the blocks, unless configured off."""


class Removed(msgspec.Struct, array_like=True, tag="r"):
    """Blocks that a source no longer holds in a tier."""

    engine_hashes: bytes
    tier: int = 0


class Cleared(msgspec.Struct, array_like=True, tag="c"):
    """A source's set is empty, in every tier."""


Event = Stored | Removed | Cleared


class Message(msgspec.Struct, array_like=True):
    """All that changed in one engine step of one source; seq counts 1, 2, 3 ... within an epoch."""

    version: int
    epoch: int
    seq: int
    time: float
    events: list[msgspec.Raw]
    blocks: int
    digest: int


class RejectedMessage(ValueError):
    """Bytes that are no message; `reason` is a short label for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_event_decoder = msgspec.msgpack.Decoder(Event)


def pack_hashes(hashes: NDArray[np.uint64]) -> bytes:
    return hashes.astype("<u8", copy=False).tobytes()


def unpack_hashes(data: bytes) -> NDArray[np.uint64]:
    """A view of packed hashes.

    Raises:
        RejectedMessage: not a whole number of hashes.
    """
    if len(data) % 8:
        raise RejectedMessage("packed_length", f"{len(data)} bytes of hashes; each takes 8")
    return np.frombuffer(data, dtype="<u8")


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def encode_message(epoch: int, seq: int, time: float, events: list[bytes], blocks: int, digest: int) -> bytes:
    """Encode a message from encoded events."""
    raw = [msgspec.Raw(event) for event in events]
    return _encoder.encode(Message(PROTOCOL_VERSION, epoch, seq, time, raw, blocks, digest))


def decode_message(data: bytes) -> Message:
    """Read a message's envelope; its events stay raw until `decode_events`.

    Raises:
        RejectedMessage: not a message, or of another major version.
    """
    try:
        message = _message_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        version = _version_of(data)
        if version is not None and version != PROTOCOL_VERSION:
            raise RejectedMessage("version", _unknown_version(version)) from None
        raise RejectedMessage("malformed", f"not a message: {error}") from None
    if message.version != PROTOCOL_VERSION:
        raise RejectedMessage("version", _unknown_version(message.version))
    limit = 2**64
    if not (1 <= message.epoch < limit and 1 <= message.seq < limit and 0 <= message.digest < limit):
        raise RejectedMessage("range", f"epoch {message.epoch}, seq {message.seq} or digest is out of range")
    if message.blocks < 0:
        raise RejectedMessage("range", f"blocks is {message.blocks}; a count can't be negative")
    return message


def decode_events(message: Message) -> list[Event]:
    """Read a message's events.

    Raises:
        RejectedMessage: one of them can't be read; none may be applied then (the source is repaired instead).
    """
    try:
        return [_event_decoder.decode(raw) for raw in message.events]
    except (msgspec.DecodeError, RecursionError) as error:
        raise RejectedMessage("event", f"message {message.seq} has an event that can't be read: {error}") from None


def _version_of(data: bytes) -> int | None:
    """The first element of an array whose other elements we do not know."""
    try:
        parts: Any = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(parts, list) and parts and isinstance(parts[0], int):
        return parts[0]
    return None


def _unknown_version(version: int) -> str:
    return f"message version {version} is unknown; this side speaks version {PROTOCOL_VERSION}: upgrade the older one"
