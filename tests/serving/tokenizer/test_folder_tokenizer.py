"""Tokenizers of checkpoint folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from serving.tokenizer import IncrementalDecoder, TokenizerError, load_tokenizer

from .conftest import BYTE_TOKENS, Write


def write_folder(folder: Path, **config: Any) -> Path:
    """A byte-level tokenizer with a merge, two special tokens and a first token for every text."""
    vocabulary = {piece: token for token, piece in enumerate([*BYTE_TOKENS, "ab", "<s>", "</s>"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_loads_with_its_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.encode("ab", add_special_tokens=True) == [257, 256]
    assert tokenizer.encode("ab</s>") == [256, 258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (257, (258,), 259)
    assert tokenizer.render_chat([]) == "<s>"
    assert tokenizer.decode([257, 256]) == "ab"
    assert tokenizer.decode(tokenizer.encode("né 漢 🎉")) == "né 漢 🎉"


def test_the_template_file_wins_over_the_configured_one(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(write_folder(tmp_path)).render_chat([]) == "from the file"


def test_named_templates_are_read(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load_tokenizer(write_folder(tmp_path, chat_template=templates))
    assert tokenizer.render_chat([], tools=[{"type": "function"}]) == "tools"


def test_the_ids_that_end_a_generation_are_gathered_from_all_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(write_folder(tmp_path)).eos_token_ids == (5, 7, 258)


def test_the_same_tokenizer_has_the_same_fingerprint_in_both_formats(tmp_path: Path, write_gguf: Write) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_gguf(merges=("a b",), added=(("<s>", 3), ("</s>", 3)), chat_template="{{ bos_token }}")
    assert load_tokenizer(write_folder(folder)).fingerprint == load_tokenizer(path).fingerprint


def test_a_sentencepiece_folder_spells_spaces_and_bytes(tmp_path: Path) -> None:
    """The layout of Llama 2: a space before the text, `▁` for spaces, bytes for what has no token."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token for token, piece in enumerate(tokens)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a aé")
    assert ids == [tokens.index("▁a")] * 2 + [tokens.index("<0xC3>"), tokens.index("<0xA9>")]
    assert tokenizer.decode(ids) == made.decode(ids) == "a aé"
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == [" a", " a", "", "é"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer.json", "[]", "a JSON object is needed"),
        ("tokenizer.json", '{"model": {"type": "WordPiece"}}', "model.type is 'WordPiece'; BPE is supported"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "tokenizer.json"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template must be"),
        ("config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    write_folder(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_another_decoder_is_refused(tmp_path: Path) -> None:
    described = json.loads((write_folder(tmp_path) / "tokenizer.json").read_text())
    described["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(TokenizerError, match=r"WordPiece.*ByteLevel"):
        load_tokenizer(tmp_path)


def test_nothing_at_the_path_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer here"):
        load_tokenizer(tmp_path / "absent")
