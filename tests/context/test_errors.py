"""The error family: flags, constructors, and the way over JSON."""

from __future__ import annotations

import json

import pytest

from context import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)

EVERY_KIND = [
    ContextOverflowError(None, None),
    ContextOverflowError(3, "full", is_transient=False),
    RequestOverflowError(4, "all 8 request rows are taken"),
    TokenOverflowError(5, "too many tokens", is_transient=False),
    MaxSequenceLengthOverflowError(6, "too long"),
    BlockOverflowError(7, "no blocks"),
    BlockOverflowError(7, "never", is_transient=False),
    ActiveRequestCountOverflowError(8, 9),
    TensorStateDeallocatedError(10, "suspended"),
    TensorStateDeallocatedError(None, None, is_transient=False),
]


@pytest.mark.parametrize("error", EVERY_KIND, ids=lambda error: type(error).__name__)
def test_every_class_survives_the_way_over_json(error: ContextOverflowError) -> None:
    data = json.loads(json.dumps(ContextErrorFactory.serialize(error)))
    again = ContextErrorFactory.deserialize(data)
    assert type(again) is type(error)
    assert (again.request_id, again.message, again.is_transient) == (
        error.request_id,
        error.message,
        error.is_transient,
    )
    assert str(again) == str(error)


def test_a_serialized_error_has_the_four_fields_of_the_spec() -> None:
    data = ContextErrorFactory.serialize(BlockOverflowError(7, "no blocks"))
    assert data == {"type": "BlockOverflowError", "request_id": 7, "message": "no blocks", "is_transient": True}


def test_counts_of_a_count_overflow_survive() -> None:
    again = ContextErrorFactory.deserialize(ContextErrorFactory.serialize(ActiveRequestCountOverflowError(8, 9)))
    assert isinstance(again, ActiveRequestCountOverflowError)
    assert (again.max_request_count, again.active_request_count) == (8, 9)
    assert "9" in str(again)
    assert "8" in str(again)


@pytest.mark.parametrize("name", ["NoSuchError", "ValueError", None, 3])
def test_an_unknown_type_is_a_clear_error(name: object) -> None:
    with pytest.raises(ValueError, match=r"unknown context error type.*known: ActiveRequestCount"):
        ContextErrorFactory.deserialize({"type": name, "request_id": 1, "message": "", "is_transient": True})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="'is_transient'"):
        ContextErrorFactory.deserialize({"type": "BlockOverflowError", "request_id": 1, "message": ""})


def test_a_foreign_error_is_not_serialized() -> None:
    class Other(ContextOverflowError):
        pass

    with pytest.raises(ValueError, match="'Other' is not a context error"):
        ContextErrorFactory.serialize(Other(1))


def test_a_too_long_sequence_is_permanent() -> None:
    assert not MaxSequenceLengthOverflowError(1, "x").is_transient
    assert RequestOverflowError(1).is_transient
