"""Sizes in bytes, written for people."""

from __future__ import annotations

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def get_mem_size_str(n_bytes: int) -> str:
    """Return a size with three significant digits and its unit, in steps of 1024: 0 -> "0 bytes", 1536 -> "1.5 KB".

    Sizes beyond the terabyte stay in TB.

    Raises:
        ValueError: n_bytes is negative.
    """
    if n_bytes < 0:
        raise ValueError(f"n_bytes is {n_bytes}; a size can't be negative")
    unit = 0
    # Dividing exactly, in whole numbers, keeps the borders right where floats would round 1024**4 - 1 up to 1 TB.
    while unit < len(_UNITS) - 1 and n_bytes >= 1024 ** (unit + 1):
        unit += 1
    if unit == 0:
        return f"{n_bytes} bytes"
    value = n_bytes / 1024**unit
    if value >= 999.5:
        return f"{n_bytes // 1024**unit} {_UNITS[unit]}"
    return f"{value:.3g} {_UNITS[unit]}"
