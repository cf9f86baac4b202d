"""Hashes equal those of the reference library and of events that a real Dynamo published."""

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvevents.hashing import as_tokens, block_hashes, hash_bytes, seed, sequence_hashes

TOKEN = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)


@given(SEED)
def test_every_length_class_equals_the_reference(number: int) -> None:
    data = np.random.default_rng(number % 1000).bytes(5000)
    for length in [*range(0, 260, 7), 16, 17, 128, 129, 240, 241, 256, 512, 1024, 1025, 1088, 2048, 4097, 5000]:
        assert hash_bytes(data[:length], number) == xxhash.xxh3_64_intdigest(data[:length], number)


def test_every_short_length_equals_the_reference() -> None:
    data = np.random.default_rng(5).bytes(1200)
    for length in range(1200):
        assert hash_bytes(data[:length], 1337) == xxhash.xxh3_64_intdigest(data[:length], 1337), length


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8, 16, 17, 32, 60, 61, 64, 128, 256, 512, 1024, 4096])
def test_block_hashes_equal_the_reference_at_any_block_size(block_size: int) -> None:
    tokens = np.random.default_rng(block_size).integers(0, 2**32, 3 * block_size + block_size // 2, dtype=np.uint32)
    expected = [
        xxhash.xxh3_64_intdigest(tokens[i * block_size : (i + 1) * block_size].astype("<u4").tobytes(), 1337)
        for i in range(len(tokens) // block_size)
    ]
    assert block_hashes(tokens, block_size).tolist() == expected


@given(st.lists(TOKEN, max_size=70), st.integers(1, 9), st.text(max_size=8), st.text(max_size=8))
def test_sequence_hashes_chain_as_documented(tokens: list[int], block_size: int, lora: str, salt: str) -> None:
    start = 1337
    start += xxhash.xxh3_64_intdigest(lora.encode(), 0) if lora else 0
    start += xxhash.xxh3_64_intdigest(salt.encode(), 1) if salt else 0
    assert seed(lora, salt) == start % 2**64
    expected: list[int] = []
    for i in range(len(tokens) // block_size):
        packed = np.array(tokens[i * block_size : (i + 1) * block_size], dtype="<u4").tobytes()
        token_hash = xxhash.xxh3_64_intdigest(packed, start % 2**64)
        if expected:
            token_hash = xxhash.xxh3_64_intdigest(np.array([expected[-1], token_hash], dtype="<u8").tobytes(), 1337)
        expected.append(token_hash)
    assert sequence_hashes(tokens, block_size, lora=lora, salt=salt).tolist() == expected


@given(st.lists(TOKEN, min_size=8, max_size=60), st.integers(1, 5))
def test_hashing_in_pieces_with_a_parent_equals_hashing_at_once(tokens: list[int], pieces: int) -> None:
    whole = sequence_hashes(tokens, 2)
    cut = 2 * (len(whole) // pieces)
    head = sequence_hashes(tokens[:cut], 2)
    tail = sequence_hashes(tokens[cut:], 2, parent=int(head[-1]) if len(head) else None)
    assert [*head.tolist(), *tail.tolist()] == whole.tolist()


# The first stored event that a Dynamo 1.6.1 mocker published over NATS for a prompt that began with these tokens.
_CAPTURED_TOKENS = [266, 320, 322, 311, 316, 318, 298, 317, 309, 325, 298, 320, 322, 311, 316, 318]
_CAPTURED = [  # (block hash, token hash)
    (13097486021078199486, 13097486021078199486),
    (10271048751918059877, 4632646506794041232),
    (11804773345710743170, 9850846951910578675),
]


def test_captured_dynamo_events_have_our_hashes() -> None:
    assert sequence_hashes(_CAPTURED_TOKENS, 16).tolist() == [_CAPTURED[0][0]]
    for (parent, _), (block, token_hash) in itertools.pairwise(_CAPTURED):
        assert hash_bytes(np.array([parent, token_hash], dtype="<u8").tobytes(), 1337) == block


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint32, np.uint64])
def test_lists_and_arrays_of_any_integer_type_hash_alike(dtype: type) -> None:
    tokens = list(range(50))
    assert sequence_hashes(np.array(tokens, dtype=dtype), 4).tolist() == sequence_hashes(tokens, 4).tolist()


def test_a_strided_view_and_a_read_only_array_hash_by_their_values() -> None:
    wide = np.arange(64, dtype=np.uint32)
    assert block_hashes(wide[::2], 4).tolist() == block_hashes(list(range(0, 64, 2)), 4).tolist()
    wide.setflags(write=False)
    assert block_hashes(wide, 4).tolist() == block_hashes(list(range(64)), 4).tolist()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], r"tokens\[1\] is -1"),
        ([2**32], r"tokens\[0\] is 4294967296"),
        (np.array([2**64 - 1], dtype=np.uint64), "tokens"),
        ([2**70], "whole numbers"),
        (["a"], "whole numbers"),
        ([[1, 2]], "shape"),
        ([1.5], "whole numbers"),
        (np.array([1.5, 2.5]), "whole numbers"),
    ],
)
def test_what_is_no_token_is_refused_by_name(tokens: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_tokens(tokens)  # type: ignore[arg-type]


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        sequence_hashes([1], 0)


def test_no_complete_block_has_no_hash() -> None:
    assert sequence_hashes([], 16).tolist() == sequence_hashes([1, 2, 3], 16).tolist() == []
