"""Reads the header of a GGUF file: its metadata and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
A vocabulary of 50,000 entries takes some 60 ms here; the reader of the `gguf` package, which makes several
arrays an entry, takes seconds.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MAX_DIMENSIONS = 8


class GGUFError(ValueError):
    """The file is not a GGUF file that we can read; the message names the file, what is wrong and where."""


class TensorEntry(NamedTuple):
    """Where a tensor lies.  `shape` is in row-major order (the file's reversed), `type` a GGML type."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    """Bytes from the start of the file."""


class GGUFHeader(NamedTuple):
    """What a GGUF file says about itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The metadata value of `key`.  Raises `GGUFError` when it is absent or of another type."""
        value = self.metadata.get(key)
        if value is None:
            raise GGUFError(f"{self.path}: the metadata has no {key!r}")
        if not isinstance(value, kind):
            raise GGUFError(f"{self.path}: {key!r} is of type {type(value).__name__}, which it must not be")
        return value


def read_header(path: str | Path) -> GGUFHeader:
    """Read metadata and the tensor table; no tensor data is touched.

    Raises `GGUFError` for a file of another kind, an unsupported version, a cut file or impossible lengths,
    and `OSError` when the file cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise GGUFError(f"{path}: too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Cursor(path, data).header()
            except struct.error:
                raise GGUFError(f"{path}: the header is cut off") from None
            except UnicodeDecodeError as error:
                raise GGUFError(f"{path}: a string in the header is not UTF-8 ({error.reason})") from None


class _Cursor:
    """Walks the header from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._data[:4] != _MAGIC:
            raise GGUFError(f"{self._path}: not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        version = self._u32()
        if version not in _VERSIONS:
            raise GGUFError(f"{self._path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
        tensor_count = self._u64()
        metadata: dict[str, Any] = {}
        for _ in range(self._count(self._u64(), least_bytes=13)):
            key = self._string()
            metadata[key] = self._value(self._u32(), key)
        entries = [self._tensor() for _ in range(self._count(tensor_count, least_bytes=24))]
        start = self._aligned(metadata.get("general.alignment", 32))
        tensors = {entry.name: entry._replace(offset=entry.offset + start) for entry in entries}
        return GGUFHeader(self._path, metadata, tensors)

    def _aligned(self, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"{self._path}: general.alignment is {alignment!r}, not a positive number")
        return -(-self._at // alignment) * alignment

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return value

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self._at)
        self._at += 8
        return value

    def _count(self, count: int, *, least_bytes: int) -> int:
        """`count`, if so many things can still follow: a corrupt length must not eat the memory."""
        if count * least_bytes > self._size - self._at:
            raise GGUFError(f"{self._path}: at byte {self._at}, {count} entries are announced but the file ends before")
        return count

    def _string(self) -> str:
        start = self._at + 8
        end = start + self._count(self._u64(), least_bytes=1)
        self._at = end
        return self._data[start:end].decode("utf-8")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise GGUFError(f"{self._path}: {key!r} has the unknown value type {kind}")
        (value,) = scalar.unpack_from(self._data, self._at)
        self._at += scalar.size
        return value

    def _array(self, key: str) -> list[Any]:
        kind = self._u32()
        count = self._u64()
        if kind == _STRING:
            return self._strings(self._count(count, least_bytes=8))
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise GGUFError(f"{self._path}: {key!r} is an array of the unknown value type {kind}")
        self._count(count, least_bytes=scalar.size)
        values = struct.unpack_from(f"<{count}{scalar.format[1:]}", self._data, self._at)
        self._at += count * scalar.size
        return list(values)

    def _strings(self, count: int) -> list[str]:
        # The vocabulary goes through here: plain locals instead of `_string`.
        data, size, at, unpack = self._data, self._size, self._at, _U64.unpack_from
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                raise GGUFError(f"{self._path}: a string array runs past the end of the file")
            strings.append(data[start:at].decode("utf-8"))
        self._at = at
        return strings

    def _tensor(self) -> TensorEntry:
        name = self._string()
        dimensions = self._u32()
        if dimensions > _MAX_DIMENSIONS:
            raise GGUFError(f"{self._path}: tensor {name!r} announces {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))
        return TensorEntry(name, shape[::-1], self._u32(), self._u64())
