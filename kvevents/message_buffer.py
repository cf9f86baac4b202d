"""Messages of one source that can't be applied yet, bounded in number and bytes."""

from __future__ import annotations

from kvevents.messages import Message

_MESSAGES = 4096
_BYTES = 64 * 1024 * 1024


class MessageBuffer:
    """Messages of one epoch by seq; what does not fit becomes a hole, which a repair fills."""

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def oldest(self) -> int:
        """The lowest seq; the buffer must not be empty."""
        return min(self._messages)

    @property
    def newest(self) -> int:
        """The highest seq, 0 when empty."""
        return max(self._messages, default=0)

    def keep(self, message: Message) -> str | None:
        """Take a message in; return None, or why it was not kept."""
        if message.seq in self._messages:
            return "duplicate"
        size = _size(message)
        if len(self._messages) >= _MESSAGES or self._bytes + size > _BYTES:
            return "buffer_full"
        self._messages[message.seq] = message
        self._bytes += size
        return None

    def take(self, seq: int) -> Message | None:
        """Remove and return the message `seq`, or None."""
        message = self._messages.pop(seq, None)
        if message is not None:
            self._bytes -= _size(message)
        return message

    def forget_until(self, seq: int) -> None:
        """Drop messages up to and including `seq`."""
        for number in [number for number in self._messages if number <= seq]:
            self.take(number)

    def clear(self) -> None:
        self._messages.clear()
        self._bytes = 0

    def check_integrity(self) -> None:
        """Assert that the bytes are counted right.

        Raises:
            AssertionError: they are not.
        """
        assert self._bytes == sum(map(_size, self._messages.values())), "buffered bytes are miscounted"


def _size(message: Message) -> int:
    """Bytes that keeping a message costs: those of its events, which are views of what was received."""
    return sum(memoryview(event).nbytes for event in message.events)
