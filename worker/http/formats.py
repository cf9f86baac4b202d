"""The two forms in which an answer leaves: chat completions and completions, whole and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from typing import Protocol

import msgspec
from msgspec import UnsetType

from serving.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    TopLogprob,
    Usage,
)
from serving.tokenizer import Tokenizer
from worker.engine import Output, TokenOutput

ChunkUsage = Usage | UnsetType | None
"""UNSET leaves the field out; None is what chunks carry before the one with the usage."""

_encode = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """Writes one answer; `choice` counts over all prompts and their choices."""

    def opening(self, choice: int, usage: ChunkUsage) -> bytes | None:
        """A chunk that comes before a choice's first token, if this form has one."""

    def chunk(self, choice: int, output: Output, usage: ChunkUsage) -> bytes:
        """What a choice has produced."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk: no choices, only usage."""

    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """A whole answer with all choices."""


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._model, self._tokenizer, self._has_logprobs = model, tokenizer, logprobs
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def opening(self, choice: int, usage: ChunkUsage) -> bytes:
        """The chunk that names the role."""
        return self._chunk([ChatChunkChoice(choice, Delta(role="assistant", content=""))], usage)

    def chunk(self, choice: int, output: Output, usage: ChunkUsage) -> bytes:
        """See `AnswerFormat.chunk`."""
        delta = Delta(content=output.text) if output.text or output.finish is None else Delta()
        return self._chunk([ChatChunkChoice(choice, delta, _finish(output), self._logprobs(output.tokens))], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See `AnswerFormat.usage_chunk`."""
        return self._chunk([], usage)

    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """See `AnswerFormat.whole`."""
        choices = [
            ChatChoice(choice, AssistantMessage(output.text), _finish(output), self._logprobs(output.tokens))
            for choice, output in enumerate(outputs)
        ]
        return _encode(ChatCompletion(self._id, self._created, self._model, choices, usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> bytes:
        return _encode(ChatCompletionChunk(self._id, self._created, self._model, choices, usage=usage))

    def _logprobs(self, tokens: list[TokenOutput]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return ChatLogprobs([self._logprob(token) for token in tokens])

    def _logprob(self, output: TokenOutput) -> ChatLogprob:
        assert output.logprobs is not None, "asked for and not computed"
        data = self._tokenizer.token_bytes(output.token)
        top = [
            TopLogprob(_text(other := self._tokenizer.token_bytes(token)), logprob, list(other))
            for token, logprob in output.logprobs.top
        ]
        return ChatLogprob(_text(data), output.logprobs.chosen, list(data), top)


class CompletionFormat:
    """`text_completion`, whole and in parts; `echoes` are the prompts' texts to repeat, by choice."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, logprobs: int | None, echoes: list[str] | None = None
    ) -> None:
        self._model, self._tokenizer, self._top = model, tokenizer, logprobs
        self._echoes = echoes
        self._id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._offsets: dict[int, int] = {}
        """Characters of a choice's tokens so far."""

    def opening(self, choice: int, usage: ChunkUsage) -> bytes | None:
        """The echo of the prompt, if asked for."""
        if self._echoes is None:
            return None
        return self._encode([CompletionChoice(choice, self._echoes[choice], None)], usage)

    def chunk(self, choice: int, output: Output, usage: ChunkUsage) -> bytes:
        """See `AnswerFormat.chunk`."""
        return self._encode([self._choice(choice, output, output.text)], usage)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See `AnswerFormat.usage_chunk`."""
        return self._encode([], usage)

    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """See `AnswerFormat.whole`."""
        echoes = self._echoes or [""] * len(outputs)
        choices = [self._choice(choice, output, echoes[choice] + output.text) for choice, output in enumerate(outputs)]
        return self._encode(choices, usage)

    def _encode(self, choices: list[CompletionChoice], usage: ChunkUsage) -> bytes:
        return _encode(Completion(self._id, self._created, self._model, choices, usage=usage))

    def _choice(self, choice: int, output: Output, text: str) -> CompletionChoice:
        return CompletionChoice(choice, text, _finish(output), self._logprobs(choice, output.tokens))

    def _logprobs(self, choice: int, tokens: list[TokenOutput]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        told = CompletionLogprobs([], [], [], [] if self._top else None)
        for output in tokens:
            assert output.logprobs is not None, "asked for and not computed"
            text = _text(self._tokenizer.token_bytes(output.token))
            offset = self._offsets.get(choice, 0)
            self._offsets[choice] = offset + len(text)
            told.text_offset.append(offset)
            told.tokens.append(text)
            told.token_logprobs.append(output.logprobs.chosen)
            if told.top_logprobs is not None:
                top = {_text(self._tokenizer.token_bytes(t)): logprob for t, logprob in output.logprobs.top}
                told.top_logprobs.append({text: output.logprobs.chosen} | top)
        return told


def is_shown(output: Output, *, has_logprobs: bool) -> bool:
    """Whether a stream sends a chunk for this output: text may be held back for a while."""
    return bool(output.text) or output.finish is not None or has_logprobs


def _finish(output: Output) -> FinishReason | None:
    if output.finish is None:
        return None
    return "stop" if output.finish == "stop" else "length"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
