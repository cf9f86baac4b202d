"""Reading GGUF headers."""

import contextlib
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.gguf_file import GGUFError, read_header

EXAMPLES = int(os.environ.get("WARMROUTE_PROPERTY_EXAMPLES", "300"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every kind of value and two tensors, from the format's own writer."""
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_float32("f32", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "né 漢")
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float64("f64", 0.1)
    writer.add_array("strings", ["a", "", "漢"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read(written: Path) -> None:
    values = read_header(written).metadata
    assert values == {
        "general.architecture": "llama", "u8": 200, "i8": -3, "u16": 60000, "i16": -30000, "u32": 4_000_000_000,
        "i32": -2_000_000_000, "f32": 0.5, "yes": True, "text": "né 漢", "u64": 2**63, "i64": -(2**62), "f64": 0.1,
        "strings": ["a", "", "漢"], "numbers": [1, -2, 3],
    }  # fmt: skip


def test_tensors_lie_where_the_header_says(written: Path) -> None:
    tensors = read_header(written).tensors
    data = written.read_bytes()
    assert tensors["one"].shape == (2, 3)
    assert np.frombuffer(data, np.float32, 6, tensors["one"].offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(data, np.float16, 4, tensors["two"].offset).tolist() == [0, 1, 2, 3]


def test_a_required_value_must_be_there_and_of_its_type(written: Path) -> None:
    header = read_header(written)
    assert header.require("u8", int) == 200
    with pytest.raises(GGUFError, match="no 'absent'"):
        header.require("absent", int)
    with pytest.raises(GGUFError, match="'text' is of type str"):
        header.require("text", int)


def test_a_cut_file_is_refused_wherever_the_header_is_cut(written: Path, tmp_path: Path) -> None:
    data = written.read_bytes()
    end = min(entry.offset for entry in read_header(written).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(0, end - 32, 3):
        cut.write_bytes(data[:length])
        with pytest.raises(GGUFError):
            read_header(cut)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"JUNK", "not a GGUF file"),
        (4, b"\x00\x00\x00\x03", "version 50331648 is not supported"),
        (4, b"\x01", "version 1"),
    ],
)
def test_another_kind_of_file_is_named(written: Path, tmp_path: Path, at: int, value: bytes, message: str) -> None:
    data = bytearray(written.read_bytes())
    data[at : at + len(value)] = value
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=message):
        read_header(path)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(4, 700), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    written: Path, tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(written.read_bytes())
    for at, value in damage:
        data[at % len(data)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(GGUFError):
        read_header(path)
