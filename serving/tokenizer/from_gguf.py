"""Builds the tokenizer that a GGUF file describes in its metadata."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from serving.gguf_file import GGUFHeader, read_header
from serving.tokenizer.bpe import BPETokenizer, TokenizerParts, fingerprint
from serving.tokenizer.chat_template import ChatTemplate
from serving.tokenizer.interface import TokenizerError
from serving.tokenizer.pieces import byte_level_bytes
from serving.tokenizer.pretokenizers import WORD_SPLITS, WordSplit

_CONTROL = 3
_USER_DEFINED = 4
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_PIECES = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end a generation though only some files name them in the metadata."""
_TEMPLATE_KEY = "tokenizer.chat_template"


def tokenizer_from_gguf(path: Path) -> BPETokenizer:
    """Load from the metadata of `path`; some 0.2 s for 50,000 tokens.

    Raises `TokenizerError` for a vocabulary kind or a pre-tokenizer that is not supported, `GGUFError` for a
    broken file.
    """
    header = read_header(path)
    split = _word_split(header)
    vocabulary = _strings(header, "tokenizer.ggml.tokens")
    merges = _strings(header, "tokenizer.ggml.merges")
    types = header.metadata.get("tokenizer.ggml.token_type", [1] * len(vocabulary))
    if len(types) != len(vocabulary):
        raise TokenizerError(f"{path}: {len(types)} token types for {len(vocabulary)} tokens")
    special = frozenset(token for token, kind in enumerate(types) if kind == _CONTROL)
    added = {token for token, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    templates = _templates(header.metadata)
    return BPETokenizer(
        TokenizerParts(
            encoder=_encoder(header, split, vocabulary, merges, special, added),
            pieces=[
                piece.encode("utf-8") if token in added else byte_level_bytes(piece)
                for token, piece in enumerate(vocabulary)
            ],
            special_token_ids=special,
            eos_token_ids=_end_ids(header, vocabulary, special),
            bos_token_id=_token_id(header, "bos_token_id", vocabulary),
            chat=ChatTemplate(templates, _named_tokens(header, vocabulary)),
            fingerprint=fingerprint(vocabulary, merges, special, templates),
            drops_leading_space=False,
        )
    )


def _word_split(header: GGUFHeader) -> WordSplit:
    kind = header.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise TokenizerError(
            f"{header.path}: tokenizer.ggml.model is {kind!r}; byte-level BPE ('gpt2') is supported. "
            "For a sentencepiece vocabulary use the checkpoint folder with its tokenizer.json"
        )
    name = header.require("tokenizer.ggml.pre", str)
    split = WORD_SPLITS.get(name)
    if split is None:
        raise TokenizerError(
            f"{header.path}: tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(WORD_SPLITS))}"
        )
    return split


def _strings(header: GGUFHeader, key: str) -> list[str]:
    values = header.require(key, list)
    # Arrays of GGUF are of one type, so the first entry tells.
    if values and not isinstance(values[0], str):
        raise TokenizerError(f"{header.path}: {key} holds {type(values[0]).__name__}, not strings")
    return values


def _encoder(
    header: GGUFHeader,
    split: WordSplit,
    vocabulary: list[str],
    merges: list[str],
    special: frozenset[int],
    added: set[int],
) -> tokenizers.Tokenizer:
    pairs = []
    for place, merge in enumerate(merges):
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right:
            raise TokenizerError(f"{header.path}: tokenizer.ggml.merges[{place}] is {merge!r}, not 'left right'")
        pairs.append((left, right))
    ids = {piece: token for token, piece in enumerate(vocabulary)}
    try:
        model = models.BPE(vocab=ids, merges=pairs, ignore_merges=split.ignore_merges)
    except Exception as error:
        # The library raises plain Exception, for a merge of something that is no token.
        raise TokenizerError(f"{header.path}: the merges do not fit the vocabulary: {error}") from error
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = split.build()
    if split.normalize is not None:
        encoder.normalizer = split.normalize()
    encoder.add_tokens(
        [AddedToken(vocabulary[token], special=token in special, normalized=False) for token in sorted(added)]
    )
    _add_frame(encoder, header, split, vocabulary)
    return encoder


def _add_frame(encoder: tokenizers.Tokenizer, header: GGUFHeader, split: WordSplit, vocabulary: list[str]) -> None:
    """What `add_special_tokens` puts before and after a text."""
    bos = _token_id(header, "bos_token_id", vocabulary)
    eos = _token_id(header, "eos_token_id", vocabulary)
    before = bos is not None and header.metadata.get("tokenizer.ggml.add_bos_token", split.adds_bos)
    after = eos is not None and header.metadata.get("tokenizer.ggml.add_eos_token", False)
    frame = ["B:0"] * bool(before) + ["$A:0"] + ["E:0"] * bool(after)
    if len(frame) > 1:
        tokens = [(name, token) for name, token in (("B", bos), ("E", eos)) if token is not None]
        encoder.post_processor = processors.TemplateProcessing(single=frame, special_tokens=tokens)


def _token_id(header: GGUFHeader, name: str, vocabulary: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = header.metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < len(vocabulary)):
        raise TokenizerError(f"{header.path}: {key} is {value}, but there are {len(vocabulary)} tokens")
    return value


def _end_ids(header: GGUFHeader, vocabulary: list[str], special: frozenset[int]) -> tuple[int, ...]:
    named = {_token_id(header, key, vocabulary) for key in _END_KEYS}
    usual = {token for token in special if vocabulary[token] in _END_PIECES}
    return tuple(sorted(token for token in named | usual if token is not None))


def _named_tokens(header: GGUFHeader, vocabulary: list[str]) -> dict[str, str]:
    """The special tokens that templates refer to by name."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(header, f"{key}_token_id", vocabulary) for name, key in keys.items()}
    return {name: vocabulary[token] if token is not None else "" for name, token in ids.items()}


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    found = {}
    if isinstance(metadata.get(_TEMPLATE_KEY), str):
        found["default"] = metadata[_TEMPLATE_KEY]
    for name in metadata.get("tokenizer.chat_templates", []):
        template = metadata.get(f"{_TEMPLATE_KEY}.{name}")
        if isinstance(template, str):
            found[name] = template
    return found
