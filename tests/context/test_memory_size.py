"""Sizes in words, at every border of a unit."""

from __future__ import annotations

import pytest

from context import get_mem_size_str


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KB"),
        (1536, "1.5 KB"),
        (1024**2 - 1, "1023 KB"),
        (1024**2, "1 MB"),
        (1024**3 - 1, "1023 MB"),
        (1024**3, "1 GB"),
        (int(2.345 * 1024**3), "2.34 GB"),
        (1024**4 - 1, "1023 GB"),
        (1024**4, "1 TB"),
        (999 * 1024**4, "999 TB"),
        (1024**5, "1024 TB"),
        (10**30, "909494701772928237 TB"),
    ],
)
def test_size_at_every_border(n_bytes: int, text: str) -> None:
    assert get_mem_size_str(n_bytes) == text


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        get_mem_size_str(-1)
