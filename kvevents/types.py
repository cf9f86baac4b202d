"""What travels besides block events: who a source is, its load, and a worker's heartbeat."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

PROTOCOL_VERSION = 1
"""The major version of everything on `kv.v1.*`; a message of another one is refused by name."""


class SourceId(NamedTuple):
    """One cache: a worker and its data-parallel rank."""

    worker: str
    dp_rank: int


class Load(msgspec.Struct, array_like=True):
    """A source's load at the time of its beat; blocks are KV blocks, tokens prompt tokens."""

    running: int
    waiting: int
    prefill_tokens: int
    """Promised and not yet computed."""
    decode_blocks: int
    blocks_used: int
    blocks_total: int


class SourceBeat(msgspec.Struct, array_like=True):
    """One source's place in its stream: the set of blocks after message `seq` of incarnation `epoch`."""

    dp_rank: int
    epoch: int
    seq: int
    blocks: int
    digest: int
    load: Load


class Beat(msgspec.Struct, array_like=True):
    """A worker's heartbeat and registration, on `kv.v1.beat.<worker>`; times are Unix seconds."""

    version: int
    worker: str
    model: str
    address: str
    block_size: int
    capacity_blocks: int
    max_sequence_length: int
    tokenizer: str
    """Fingerprint of vocabulary and chat template."""
    state: str
    """starting, ready, draining or stopped."""
    sent_at: float
    sources: list[SourceBeat]
    features: list[str] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Beat)


def encode_beat(beat: Beat) -> bytes:
    return _encoder.encode(beat)


def decode_beat(data: bytes) -> Beat:
    """Read a heartbeat; fields that a newer minor version appends are skipped.

    Raises:
        msgspec.DecodeError: not a heartbeat; the message carries the field's path.
    """
    return _decoder.decode(data)
