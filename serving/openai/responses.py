"""What clients receive: completions, chunks of streams, usage, log probabilities, lists of models."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct):
    """How the prompt was handled."""

    cached_tokens: int
    """Prompt tokens whose keys and values came from the cache, so that no forward computed them."""


class Usage(msgspec.Struct):
    """Tokens of one request, all its choices together; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    """A likely token of one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One generated token of a chat completion."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat choice."""

    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion choice, in parallel lists with one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class AssistantMessage(msgspec.Struct):
    """A whole answer."""

    content: str
    role: str = "assistant"


class ChatChoice(msgspec.Struct):
    """One whole answer of a chat completion."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct):
    """One answer of a completion, whole or a part of it."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct):
    """Answer of POST /v1/completions, and each event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """A served model."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "warmroute"


class ModelList(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct):
    """Answer of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """The usage with its sum."""
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )
