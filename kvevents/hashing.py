"""Names blocks by their tokens and prefix, bit-compatible with NVIDIA Dynamo 1.6.1.

So one prompt hash serves every engine.  Token hash = xxh3_64(tokens as little-endian u32, seed); the first sequence
hash is the first token hash; each next one is xxh3_64(LE u64 parent sequence hash ‖ LE u64 token hash, 1337);
seed = 1337 + xxh3_64(lora, 0) + xxh3_64(salt, 1), wrapping, where an empty string adds nothing.  (Dynamo interop
notes, section 2; verified against captured events.)
"""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from kvevents.xxh3 import xxh3_64

CHAIN_SEED = 1337
_MASK = 0xFFFFFFFFFFFFFFFF
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
"""Any bytes, writable or not: a message from the bus is read in place."""

Tokens = Sequence[int] | NDArray[np.integer]


@njit(types.uint64(_BYTES, types.uint64), cache=True)
def _hash_bytes(data, seed):  # type: ignore[no-untyped-def]
    return xxh3_64(data, 0, len(data), seed)


@njit(types.void(_BYTES, types.int64, types.uint64, types.uint64[::1]), cache=True)
def _block_hashes(data, block_bytes, seed, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = xxh3_64(data, i * block_bytes, block_bytes, seed)


@njit("void(uint64[::1], boolean, uint64)", cache=True)
def _chain(hashes, has_parent, parent):  # type: ignore[no-untyped-def]
    pair = np.empty(2, dtype=np.uint64)
    data = pair.view(np.uint8)
    for i in range(len(hashes)):
        if has_parent:
            pair[0] = parent
            pair[1] = hashes[i]
            hashes[i] = xxh3_64(data, 0, 16, np.uint64(1337))
        parent = hashes[i]
        has_parent = True


def hash_bytes(data: bytes, seed: int = 0) -> int:
    """XXH3-64 of some bytes."""
    return int(_hash_bytes(np.frombuffer(data, dtype=np.uint8), np.uint64(seed & _MASK)))


def seed(lora: str = "", salt: str = "") -> int:
    """The seed of token hashes for a LoRA adapter and a cache salt; an empty string is none."""
    value = CHAIN_SEED
    if lora:
        value += hash_bytes(lora.encode(), 0)
    if salt:
        value += hash_bytes(salt.encode(), 1)
    return value & _MASK


def as_tokens(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as a contiguous u32 array.

    Raises:
        ValueError: an id is negative, not whole, or 2^32 or more.
    """
    if isinstance(tokens, list):
        try:  # three times as fast as numpy, which looks for a type first
            return np.frombuffer(array.array("I", tokens), dtype=np.uint32)
        except (OverflowError, TypeError):
            pass  # the slow way says which token it is
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.uint32:
        return np.ascontiguousarray(tokens)
    try:
        ids = np.asarray(tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"tokens must be whole numbers in 0..2^32-1 ({error})") from None
    if ids.ndim != 1:
        raise ValueError(f"tokens have shape {ids.shape}; one flat list of ids is expected")
    if not len(ids):
        return np.empty(0, dtype=np.uint32)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be whole numbers in 0..2^32-1, got {ids.dtype} with {ids[0]!r}")
    if int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF:
        at = int(np.flatnonzero((ids < 0) | (ids > 0xFFFFFFFF))[0])
        raise ValueError(f"tokens[{at}] is {ids[at]}; token ids lie in 0..2^32-1")
    return ids.astype(np.uint32)


def block_hashes(tokens: Tokens, block_size: int, *, lora: str = "", salt: str = "") -> NDArray[np.uint64]:
    """The token hash of every complete block: `[len(tokens) // block_size]` u64.

    Raises:
        ValueError: block_size is below 1, or a token id is out of range.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; a block holds at least 1 token")
    ids = as_tokens(tokens)
    out = np.empty(len(ids) // block_size, dtype=np.uint64)
    if len(out):
        _block_hashes(ids.view(np.uint8), 4 * block_size, np.uint64(seed(lora, salt)), out)
    return out


def sequence_hashes(
    tokens: Tokens, block_size: int, *, lora: str = "", salt: str = "", parent: int | None = None
) -> NDArray[np.uint64]:
    """The sequence hash of every complete block: `[len(tokens) // block_size]` u64.

    Args:
        parent: the sequence hash that the tokens continue; None: they begin a prompt.

    Raises:
        ValueError: block_size is below 1, or a token id is out of range.
    """
    hashes = block_hashes(tokens, block_size, lora=lora, salt=salt)
    _chain(hashes, parent is not None, np.uint64((parent or 0) & _MASK))
    return hashes
