"""Server-sent events survive any cut of the byte stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import sse

STREAM = (
    b": a comment\n\n"
    + sse.event(b'{"a": 1}')
    + b"event: error\r\nid: 7\r\ndata: one\r\ndata:two\r\n\r\n"
    + b"data\n\n"
    + sse.event("größe".encode())
    + sse.DONE
)
EVENTS = [
    sse.ServerEvent(b'{"a": 1}'),
    sse.ServerEvent(b"one\ntwo", "error", "7"),
    sse.ServerEvent(b"", "message", "7"),
    sse.ServerEvent("größe".encode(), "message", "7"),
    sse.ServerEvent(b"[DONE]", "message", "7"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    parser, got, last = sse.SSEParser(), [], 0
    for cut in [*sorted(cuts), len(STREAM)]:
        got += parser.feed(STREAM[last:cut])
        last = cut
    assert got == EVENTS
    assert got[-1].is_done
    assert not got[0].is_done


def test_a_byte_order_mark_at_the_start_is_ignored() -> None:
    parser = sse.SSEParser()
    assert parser.feed(b"\xef") == []
    assert parser.feed(b"\xbb\xbfdata: x\n\n") == [sse.ServerEvent(b"x")]


def test_an_event_that_does_not_end_is_not_kept_for_ever() -> None:
    parser = sse.SSEParser(max_event_bytes=100)
    for _ in range(9):
        parser.feed(b"data: 56789\n")
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        parser.feed(b"data: " + b"x" * 90)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_any_bytes_are_taken_without_an_exception(chunks: list[bytes]) -> None:
    parser = sse.SSEParser()
    for chunk in chunks:
        parser.feed(chunk)
