"""How each family of byte-level vocabularies cuts a text into words before merging, by GGUF's name for it."""

from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers


class WordSplit(NamedTuple):
    """The steps before merging, and what else hangs on the family."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalize: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    """A word that is a token as it stands is not merged from bytes."""
    adds_bos: bool = False
    """Whether a text starts with the first token when the file does not say."""


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The word pattern that came with cl100k: contractions in any case, digits as `digits`, lines apart."""
    pattern = "|".join(
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )

    def build() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_GPT2 = WordSplit(_gpt2)
_SMOLLM = WordSplit(_single_digits)
_LLAMA3 = WordSplit(_words(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = WordSplit(_words(r"\p{N}"), normalize=normalizers.NFC)

WORD_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""Value of `tokenizer.ggml.pre` -> how words are split."""
