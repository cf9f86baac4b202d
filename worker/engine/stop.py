"""Finds stop strings in a text that arrives in pieces, and holds back what may be the start of one."""

from typing import NamedTuple


class Checked(NamedTuple):
    """What became certain with a piece of text."""

    text: str
    """To be shown now."""
    is_stopped: bool


class StopStrings:
    """One answer's stop strings; `include` shows the one that ended it as well."""

    def __init__(self, strings: tuple[str, ...], *, include: bool = False) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> Checked:
        """Add a piece; while not `armed` (before min_tokens), nothing in it can begin a stop string."""
        if not self._strings or not armed:
            text, self._held = self._held + piece, ""
            return Checked(text, False)
        text = self._held + piece
        found = self._first(text)
        if found is not None:
            start, end = found
            self._held = ""
            return Checked(text[: end if self._include else start], True)
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return Checked(text[: len(text) - keep], False)

    def flush(self) -> str:
        """What is still held back: the answer ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int] | None:
        """The stop string that ends first, as (start, end): the one that a reader letter by letter meets."""
        spans = [(at, at + len(stop)) for stop in self._strings if (at := text.find(stop)) >= 0]
        return min(spans, key=lambda span: (span[1], span[0])) if spans else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._strings:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
