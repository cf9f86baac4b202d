"""Server-sent events: writing them, and reading them back from a byte stream cut anywhere."""

from typing import NamedTuple

DONE = b"data: [DONE]\n\n"
"""The last event of an OpenAI stream."""

_MAX_EVENT_BYTES = 64 * 1024 * 1024


def event(data: bytes) -> bytes:
    """One event with `data`, which must hold no line break (JSON as msgspec writes it holds none)."""
    return b"data: " + data + b"\n\n"


class ServerEvent(NamedTuple):
    """One event as it was received."""

    data: bytes
    """The data lines, joined by a line feed."""
    name: str = "message"
    id: str = ""

    @property
    def is_done(self) -> bool:
        """Whether this is the end marker of an OpenAI stream."""
        return self.data == b"[DONE]"


class SSEParser:
    """Bytes in, complete events out; follows the event-stream format of the HTML standard.

    `max_event_bytes` bounds what is kept of an event that does not end.
    """

    def __init__(self, *, max_event_bytes: int = _MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = b""
        self._first = True
        self._skip_line_feed = False
        self._data: list[bytes] = []
        self._size = 0
        self._name = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that `chunk` completes.

        Raises ValueError when one event grows beyond the limit.
        """
        if not chunk:
            return []
        if self._skip_line_feed:
            # A line may end in \r\n, and the chunk before ended in the \r.
            self._skip_line_feed = False
            chunk = chunk.removeprefix(b"\n")
        text = self._rest + chunk
        if self._first and len(text) >= len(b"\xef\xbb\xbf"):
            self._first = False
            text = text.removeprefix(b"\xef\xbb\xbf")
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._skip_line_feed = text.endswith(b"\r")
        self._rest = lines.pop()
        events = [done for line in lines if (done := self._line(line)) is not None]
        if self._size + len(self._rest) > self._max:
            raise ValueError(f"a server-sent event is longer than {self._max} bytes")
        return events

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, name = self._data, self._name
        self._data, self._name, self._size = [], "", 0
        return ServerEvent(b"\n".join(data), name or "message", self._id) if data else None
