"""Decoding token by token."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.tokenizer import IncrementalDecoder, Tokenizer

from .conftest import EXPRESSIBLE

EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "200"))


def test_a_character_of_several_tokens_comes_out_whole(smollm2: Tokenizer) -> None:
    ids = smollm2.encode(" 🎉")
    assert len(ids) == 3  # a space with two of the four bytes, and the other two alone
    decoder = IncrementalDecoder(smollm2)
    assert [decoder.push(token) for token in ids] == [" ", "", "🎉"]
    assert decoder.flush() == ""


def test_an_unfinished_character_is_flushed_as_replacement(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🎉")
    decoder = IncrementalDecoder(smollm2)
    assert "".join(decoder.push(token) for token in ids[:-1]) == ""
    assert decoder.flush() == "\ufffd"
    assert [decoder.push(token) for token in smollm2.encode("ok")] == ["ok"]


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    assert IncrementalDecoder(smollm2).push(2) == ""
    assert IncrementalDecoder(smollm2, skip_special_tokens=False).push(2) == "<|im_end|>"


@settings(max_examples=EXAMPLES, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip=st.booleans())
def test_the_pieces_joined_are_the_whole_text(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    decoder = IncrementalDecoder(smollm2, skip_special_tokens=skip)
    joined = "".join([decoder.push(token) for token in ids]) + decoder.flush()
    assert joined == smollm2.decode(ids, skip_special_tokens=skip)


@settings(max_examples=EXAMPLES, deadline=None)
@given(text=st.text(EXPRESSIBLE, min_size=1))
def test_no_replacement_character_appears_that_was_not_written(smollm2: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    decoder = IncrementalDecoder(smollm2, skip_special_tokens=False)
    assert not any("\ufffd" in decoder.push(token) for token in smollm2.encode(text))
    assert decoder.flush() == ""
