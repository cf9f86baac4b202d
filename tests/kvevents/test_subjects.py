"""Subject tokens are safe for NATS, reversible, and equal only for equal names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.subjects import (
    beat_subject,
    control_subject,
    decode_token,
    encode_token,
    events_subject,
    parse_events_subject,
)
from kvevents.types import SourceId

NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(NAME)
def test_any_name_becomes_one_safe_token_and_comes_back(name: str) -> None:
    token = encode_token(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    assert decode_token(token) == name


@given(NAME, NAME)
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assert (encode_token(one) == encode_token(other)) == (one == other)


@given(NAME, NAME, st.integers(0, 1000))
def test_an_event_subject_tells_model_and_source(model: str, worker: str, rank: int) -> None:
    source = SourceId(worker, rank)
    assert parse_events_subject(events_subject(model, source)) == (model, source)


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "modèle", "a=41", "", "\n"])
def test_awkward_names_do_not_split_a_subject(name: str) -> None:
    source = SourceId(name, 3)
    assert events_subject(name, source).count(".") == 5
    assert control_subject(source).count(".") == 4
    assert beat_subject(name).count(".") == 3


@given(st.text(max_size=40))
def test_no_subject_raises_anything_but_a_value_error(subject: str) -> None:
    for candidate in (subject, f"kv.v1.events.{subject}", f"kv.v1.events.a.b.{subject}", f"kv.v1.events.{subject}.b.1"):
        try:
            parse_events_subject(candidate)
        except ValueError:
            continue


@pytest.mark.parametrize("token", ["=4", "=zz", "a.b", "=FF", "é", "a=4g"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ValueError):
        decode_token(token)
