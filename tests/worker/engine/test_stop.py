"""Stop strings are found wherever the text is cut, and nothing of them is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.stop import StopStrings


def shown(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[str, bool]:
    matcher, text = StopStrings(stops, include=include), ""
    for piece in pieces:
        checked = matcher.push(piece)
        text += checked.text
        if checked.is_stopped:
            return text, True
    return text + matcher.flush(), False


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["one two ", "three"], (), ("one two three", False)),
        (["one STOP two"], ("STOP",), ("one ", True)),
        (["one ST", "OP two"], ("STOP",), ("one ", True)),
        (["o", "n", "e", " S", "T", "O", "P"], ("STOP",), ("one ", True)),
        (["one ST", "AND"], ("STOP",), ("one STAND", False)),
        (["one STO"], ("STOP",), ("one STO", False)),
        (["aab"], ("ab",), ("a", True)),
        (["aa", "aab"], ("aaab",), ("a", True)),
        (["x\n", "\ny"], ("\n\n",), ("x", True)),
        (["abcd"], ("bcd", "c"), ("ab", True)),
        (["grün", "e Ä", "pfel"], ("Äpfel",), ("grüne ", True)),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], expected: tuple[str, bool]) -> None:
    assert shown(pieces, stops) == expected


def test_the_stop_string_can_be_part_of_the_answer() -> None:
    assert shown(["one ST", "OP two"], ("STOP",), include=True) == ("one STOP", True)


def test_text_before_min_tokens_begins_no_stop_string() -> None:
    matcher = StopStrings(("ab",))
    assert matcher.push("xa", armed=False).text == "xa"
    assert matcher.push("b") == ("b", False)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(("\n\n", "END"))
    assert matcher.push("hello").text == "hello"
    assert matcher.push(" E").text == " "
    assert matcher.push("x").text == "Ex"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_cut_of_the_text_does_not_matter(pieces: list[str], stops: list[str], include: bool) -> None:
    letters = list("".join(pieces))
    assert shown(pieces, tuple(stops), include=include)[1] == any(stop in "".join(pieces) for stop in stops)
    assert shown(letters, tuple(stops), include=include) == shown(pieces, tuple(stops), include=include)
