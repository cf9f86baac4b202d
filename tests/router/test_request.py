"""Reading requests and splicing token ids: every other byte stays, every bad field is named."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request import read_request
from router.splice import with_token_ids
from serving.openai import OpenAIError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    members=st.dictionaries(st.text().filter(lambda k: k != "prompt_token_ids"), json_values, max_size=5),
    indent=st.none() | st.integers(0, 3),
    tail=st.text(" \t\r\n", max_size=4),
    ids=st.lists(st.integers(0, 2**32 - 1)),
)
def test_splicing_adds_one_member_and_keeps_every_other_byte(
    members: dict[str, object], indent: int | None, tail: str, ids: list[int]
) -> None:
    body = (json.dumps(members, indent=indent) + tail).encode()
    spliced = with_token_ids(body, ids)
    assert json.loads(spliced) == {**members, "prompt_token_ids": ids}
    cut = body.rstrip().rindex(b"}")
    assert spliced.startswith(body[:cut])
    assert spliced.endswith(body[cut:])


@pytest.mark.parametrize("body", [b"[1]", b"", b"7", b"  "])
def test_splicing_refuses_what_is_not_an_object(body: bytes) -> None:
    with pytest.raises(ValueError, match="object"):
        with_token_ids(body, [1])


def token_ids(body: bytes) -> list[int]:
    ids = read_request(body).token_ids
    assert ids is not None
    return ids.tolist()


def test_a_text_prompt_a_list_of_ids_and_a_batch_of_one_are_understood() -> None:
    assert read_request(b'{"model":"m","prompt":"hi"}').text == "hi"
    assert token_ids(b'{"model":"m","prompt":[1,2]}') == [1, 2]
    assert read_request(b'{"model":"m","prompt":["hi"]}').text == "hi"
    assert token_ids(b'{"model":"m","prompt":[[1,2]]}') == [1, 2]
    assert token_ids(b'{"model":"m","messages":[],"prompt_token_ids":[4294967295]}') == [2**32 - 1]


def test_a_batch_and_an_image_are_not_hashed_and_say_why() -> None:
    assert read_request(b'{"model":"m","prompt":["a","b"]}').why_unhashable == "a list of several prompts"
    image = {"type": "image_url", "image_url": {"url": "u"}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode()
    assert "other than text" in (read_request(body).why_unhashable or "")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "not valid"),
        (b'{"prompt":"x"}', "model"),
        (b'{"model":5,"prompt":"x"}', "$.model"),
        (b'{"model":"m"}', "prompt"),
        (b'{"model":"m","prompt":[]}', "prompt"),
        (b'{"model":"m","prompt":[1,-2]}', "prompt[1]"),
        (b'{"model":"m","prompt":[1,"x"]}', "prompt[1]"),
        (b'{"model":"m","prompt":[1,2.0]}', "prompt[1]"),
        (b'{"model":"m","prompt":[1,[2]]}', "prompt[1]"),
        (b'{"model":"m","prompt":[1,99999999999999999999]}', "prompt[1]"),
        (b'{"model":"m","prompt":"x","prompt_token_ids":[4294967296]}', "prompt_token_ids[0]"),
        (b'{"model":"m","messages":"x"}', "$.messages"),
        (b"\xff\xfe", "not valid"),
    ],
)
def test_bad_bodies_are_refused_with_the_field(body: bytes, named: str) -> None:
    with pytest.raises(OpenAIError) as refused:
        read_request(body)
    assert refused.value.status == 400
    assert named in refused.value.message


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with suppress(OpenAIError):
        read_request(body)
