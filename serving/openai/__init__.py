"""OpenAI's HTTP API as types: requests, responses, errors, and their decoding."""

from serving.openai.decode import (
    decode_chat,
    decode_completion,
    decode_detokenize,
    decode_tokenize,
    prompts,
)
from serving.openai.errors import OpenAIError, invalid
from serving.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
)

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "OpenAIError",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "decode_chat",
    "decode_completion",
    "decode_detokenize",
    "decode_tokenize",
    "invalid",
    "prompts",
]
