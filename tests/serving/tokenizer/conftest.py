"""Tokenizers for these tests: the real one of SmolLM2, and small ones written by other libraries' writers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import strategies as st

from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer

BYTE_TOKENS = [
    *map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100)),
    *map(chr, range(0x100, 0x144)),
]  # fmt: skip
"""The alphabet of byte-level vocabularies, in the order of GPT-2's own file."""

EXPRESSIBLE = st.characters(
    exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF
)
"""What SmolLM2's vocabulary can spell: it has no token for some control characters and for planes 4 to 11."""

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


@pytest.fixture
def write_gguf(tmp_path: Path) -> Write:
    """Writes a GGUF file with a byte-level vocabulary: the bytes, then what `merges` join, then `added`."""

    def write(
        *,
        merges: tuple[str, ...] = ("q q",),
        added: tuple[tuple[str, int], ...] = (),
        pre: str | None = "gpt-2",
        model: str = "gpt2",
        name: str = "tiny.gguf",
        **fields: Any,
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        tokens = BYTE_TOKENS + [merge.replace(" ", "") for merge in merges] + [piece for piece, _ in added]
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - len(added)) + [kind for _, kind in added])
        writer.add_token_merges(list(merges))
        for key, value in fields.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            elif isinstance(value, int):
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            else:
                writer.add_string(f"tokenizer.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / name

    return write
