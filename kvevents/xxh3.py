"""XXH3 64-bit, compiled: the hash by which NVIDIA Dynamo names blocks.

Written from the algorithm's published description (XXH3, xxHash specification 0.8); the tests hold it against the
reference library over every length class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

_SECRET: NDArray[np.uint8] = np.frombuffer(  # the algorithm's default secret, 192 bytes
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    dtype=np.uint8,
)

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_AVALANCHE, _RRMXMX = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)


@intrinsic
def _load64(typing_context: Any, data: Any, offset: Any) -> Any:
    """Read 8 bytes of a uint8 array as a little-endian u64, aligned or not."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        word = builder.load(builder.bitcast(address, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(data, types.int64), generate


@intrinsic
def _fold64(typing_context: Any, left: Any, right: Any) -> Any:
    """Multiply to 128 bits and xor the halves."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), high)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _swap64(typing_context: Any, word: Any) -> Any:
    """Reverse the bytes of a u64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


@njit(inline="always")
def _avalanche(h):  # type: ignore[no-untyped-def]
    h ^= h >> np.uint64(37)
    h *= _AVALANCHE
    return h ^ (h >> np.uint64(32))


@njit(inline="always")
def _avalanche_xxh64(h):  # type: ignore[no-untyped-def]
    h ^= h >> np.uint64(33)
    h *= _P64_2
    h ^= h >> np.uint64(29)
    h *= _P64_3
    return h ^ (h >> np.uint64(32))


@njit(inline="always")
def _mix16(data, at, secret_at, seed):  # type: ignore[no-untyped-def]
    low = _load64(data, at) ^ (_load64(_SECRET, secret_at) + seed)
    high = _load64(data, at + 8) ^ (_load64(_SECRET, secret_at + 8) - seed)
    return _fold64(low, high)


@njit(inline="always")
def _to_16(data, at, length, seed):  # type: ignore[no-untyped-def]
    size = np.uint64(length)
    if length > 8:
        flip_low = (_load64(_SECRET, 24) ^ _load64(_SECRET, 32)) + seed
        flip_high = (_load64(_SECRET, 40) ^ _load64(_SECRET, 48)) - seed
        low = _load64(data, at) ^ flip_low
        high = _load64(data, at + length - 8) ^ flip_high
        return _avalanche(size + _swap64(low) + high + _fold64(low, high))
    if length >= 4:
        first = np.uint64(0)
        last = np.uint64(0)
        for i in range(4):
            first |= np.uint64(data[at + i]) << np.uint64(8 * i)
            last |= np.uint64(data[at + length - 4 + i]) << np.uint64(8 * i)
        seed ^= _swap64(seed & np.uint64(0xFFFFFFFF)) & np.uint64(0xFFFFFFFF00000000)
        h = (last + (first << np.uint64(32))) ^ ((_load64(_SECRET, 8) ^ _load64(_SECRET, 16)) - seed)
        h ^= ((h << np.uint64(49)) | (h >> np.uint64(15))) ^ ((h << np.uint64(24)) | (h >> np.uint64(40)))
        h *= _RRMXMX
        h ^= (h >> np.uint64(35)) + size
        h *= _RRMXMX
        return h ^ (h >> np.uint64(28))
    if length > 0:
        combined = (
            (np.uint64(data[at]) << np.uint64(16))
            | (np.uint64(data[at + (length >> 1)]) << np.uint64(24))
            | np.uint64(data[at + length - 1])
            | (size << np.uint64(8))
        )
        words = _load64(_SECRET, 0)
        flip = ((words & np.uint64(0xFFFFFFFF)) ^ (words >> np.uint64(32))) + seed
        return _avalanche_xxh64(combined ^ flip)
    return _avalanche_xxh64(seed ^ _load64(_SECRET, 56) ^ _load64(_SECRET, 64))


@njit(inline="always")
def _to_128(data, at, length, seed):  # type: ignore[no-untyped-def]
    h = np.uint64(length) * _P64_1
    for pair in range((length - 1) // 32, -1, -1):
        h += _mix16(data, at + 16 * pair, 32 * pair, seed)
        h += _mix16(data, at + length - 16 * (pair + 1), 32 * pair + 16, seed)
    return _avalanche(h)


@njit
def _to_240(data, at, length, seed):  # type: ignore[no-untyped-def]
    h = np.uint64(length) * _P64_1
    for i in range(8):
        h += _mix16(data, at + 16 * i, 16 * i, seed)
    h = _avalanche(h)
    for i in range(8, length // 16):
        h += _mix16(data, at + 16 * i, 16 * (i - 8) + 3, seed)
    h += _mix16(data, at + length - 16, 136 - 17, seed)
    return _avalanche(h)


@njit(inline="always")
def _accumulate(lanes, data, at, secret, secret_at):  # type: ignore[no-untyped-def]
    for i in range(8):
        word = _load64(data, at + 8 * i)
        keyed = word ^ _load64(secret, secret_at + 8 * i)
        lanes[i ^ 1] += word
        lanes[i] += (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))


@njit
def _long(data, at, length, seed):  # type: ignore[no-untyped-def]
    secret = _SECRET.copy()
    words = secret.view(np.uint64)
    for i in range(0, 24, 2):
        words[i] += seed
        words[i + 1] -= seed
    lanes = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], dtype=np.uint64)
    blocks = (length - 1) // 1024
    for block in range(blocks):
        for stripe in range(16):
            _accumulate(lanes, data, at + block * 1024 + stripe * 64, secret, stripe * 8)
        for i in range(8):
            lanes[i] = (lanes[i] ^ (lanes[i] >> np.uint64(47)) ^ _load64(secret, 128 + 8 * i)) * _P32_1
    for stripe in range((length - 1 - blocks * 1024) // 64):
        _accumulate(lanes, data, at + blocks * 1024 + stripe * 64, secret, stripe * 8)
    _accumulate(lanes, data, at + length - 64, secret, 192 - 64 - 7)
    h = np.uint64(length) * _P64_1
    for i in range(4):
        h += _fold64(lanes[2 * i] ^ _load64(secret, 11 + 16 * i), lanes[2 * i + 1] ^ _load64(secret, 19 + 16 * i))
    return _avalanche(h)


@njit
def xxh3_64(data, at, length, seed):  # type: ignore[no-untyped-def]
    """Hash `length` bytes of a uint8 array from `at` on, with a u64 seed; to be called from compiled code."""
    if length <= 16:
        return _to_16(data, at, length, seed)
    if length <= 128:
        return _to_128(data, at, length, seed)
    if length <= 240:
        return _to_240(data, at, length, seed)
    return _long(data, at, length, seed)
