"""A loaded tokenizer: the `tokenizers` library for text to ids, a table of bytes for ids to text."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from serving.tokenizer.chat_template import ChatTemplate


class TokenizerParts(NamedTuple):
    """What a loader found out about a tokenizer."""

    encoder: tokenizers.Tokenizer
    pieces: Sequence[bytes]
    """Bytes of every token, by id; empty for an id without token."""
    special_token_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat: ChatTemplate
    fingerprint: str
    drops_leading_space: bool
    """Whether a text begins with a space that was not in it (sentencepiece), to be dropped again."""


class BPETokenizer:
    """Implements `Tokenizer` over `TokenizerParts`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._encoder = parts.encoder
        self._pieces = parts.pieces
        self._chat = parts.chat
        self._drops_leading_space = parts.drops_leading_space
        self.vocab_size = len(parts.pieces)
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token_id = parts.bos_token_id
        self.special_token_ids = parts.special_token_ids
        self.fingerprint = parts.fingerprint

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """See `Tokenizer.encode`.  Lone surrogates, which JSON may carry and UTF-8 cannot, become U+FFFD."""
        try:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            return self._encoder.encode(whole, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(token) for token in ids if token not in skipped])
        if self._drops_leading_space and text.startswith(b" "):
            text = text[1:]
        return text.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """See `Tokenizer.render_chat`."""
        return self._chat.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        prompt = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return self.encode(prompt)


def fingerprint(
    vocabulary: Iterable[str], merges: Iterable[str], special_ids: Iterable[int], templates: Mapping[str, str]
) -> str:
    """32 hex digits over the vocabulary in order of ids, merges ("left right"), special ids and templates."""
    digest = hashlib.sha256()
    sections = (
        vocabulary,
        merges,
        map(str, sorted(special_ids)),
        (f"{name}\0{templates[name]}" for name in sorted(templates)),
    )
    for section in sections:
        # 0xFF occurs in no UTF-8 text, so no two different lists give the same bytes.
        digest.update(b"\xff".join(entry.encode("utf-8") for entry in section))
        digest.update(b"\xff\xff")
    return digest.hexdigest()[:32]
