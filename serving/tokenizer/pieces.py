"""From the spelling of a token in the vocabulary to the bytes that it stands for."""

import re

_SENTENCEPIECE_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others in order from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
"""Character in a byte-level vocabulary -> byte."""


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; one with a foreign character stands for its own text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def sentencepiece_bytes(piece: str) -> bytes:
    """Bytes of a token of a sentencepiece vocabulary: `▁` is a space, `<0xE2>` one byte."""
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode("utf-8")
