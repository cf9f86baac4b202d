"""Builds the tokenizer of a checkpoint folder: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from serving.tokenizer.bpe import BPETokenizer, TokenizerParts, fingerprint
from serving.tokenizer.chat_template import ChatTemplate
from serving.tokenizer.interface import TokenizerError
from serving.tokenizer.pieces import byte_level_bytes, sentencepiece_bytes

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def tokenizer_from_folder(folder: Path) -> BPETokenizer:
    """Load the files of `folder`.

    `tokenizer_config.json` and `chat_template.jinja` may be absent; the ids that end a generation come from
    `generation_config.json`, `config.json` and the configured eos token together.
    Raises `TokenizerError` for a missing or broken file and for a tokenizer that is not BPE.
    """
    path = folder / "tokenizer.json"
    described = _read_json(path, required=True)
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise TokenizerError(f"{path}: model.type is {kind!r}; BPE is supported")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain Exception for whatever it cannot read.
        raise TokenizerError(f"{path}: {error}") from error
    encoder.no_truncation()
    encoder.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    added = {entry["id"]: entry for entry in described.get("added_tokens", [])}
    ids: dict[str, int] = {**model["vocab"], **{entry["content"]: token for token, entry in added.items()}}
    vocabulary = [""] * (max(ids.values(), default=-1) + 1)
    for piece, token in ids.items():
        vocabulary[token] = piece
    special = frozenset(token for token, entry in added.items() if entry.get("special"))
    named = _named_tokens(config)
    templates = _templates(folder, config)
    to_bytes, drops_leading_space = _spelling(path, described.get("decoder"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    return BPETokenizer(
        TokenizerParts(
            encoder=encoder,
            pieces=[
                piece.encode("utf-8") if token in added else to_bytes(piece) for token, piece in enumerate(vocabulary)
            ],
            special_token_ids=special,
            eos_token_ids=_end_ids(folder, ids.get(named["eos_token"])),
            bos_token_id=ids.get(named["bos_token"]),
            chat=ChatTemplate(templates, named),
            fingerprint=fingerprint(vocabulary, merges, special, templates),
            drops_leading_space=drops_leading_space,
        )
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise TokenizerError(f"{path} is missing; a checkpoint folder needs it")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value


def _spelling(path: Path, decoder: Any) -> tuple[Any, bool]:
    """How tokens spell bytes, told by the configured decoder, and whether to drop a leading space."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps if isinstance(step, dict)]
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        drops = any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps) or any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
        )
        return sentencepiece_bytes, drops
    raise TokenizerError(f"{path}: decoder {kinds or decoder!r}; ByteLevel, ByteFallback and Metaspace are supported")


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        named[name] = value if isinstance(value, str) else ""
    return named


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        try:
            return {entry["name"]: entry["template"] for entry in configured}
        except (KeyError, TypeError):
            raise TokenizerError(f"{folder}: chat_template must be a string or a list of name and template") from None
    return {}


def _end_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    found = set() if eos is None else {eos}
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in values):
            raise TokenizerError(f"{folder / name}: eos_token_id is {value!r}; a token id or a list of them is needed")
        found.update(values)
    return tuple(sorted(found))
