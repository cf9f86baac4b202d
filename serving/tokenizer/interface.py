"""What worker and router may ask of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded; the message names the file, the field and what is supported."""


class Tokenizer(Protocol):
    """Immutable after loading; every method may be called from any thread."""

    vocab_size: int
    """Highest token id + 1.  A model's output layer may be padded to more."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation, ascending."""
    bos_token_id: int | None
    special_token_ids: frozenset[int]
    """Control tokens: what `skip_special_tokens` leaves out."""
    fingerprint: str
    """Hex; equal for equal vocabulary, merges and chat template."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model's own configuration puts around a text (often a first token).
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD.  Raises what `token_bytes` raises."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id without token (padding of the output layer).

        Raises `ValueError` for a negative id.
        """
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for `messages` in OpenAI's form.  Raises `ChatTemplateError` when it refuses them."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself writes the special tokens."""
        ...
