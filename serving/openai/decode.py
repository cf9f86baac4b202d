"""Bytes to checked requests; every refusal is a 400 that names the path of the field."""

import re
from typing import Any, TypeVar

import msgspec

from serving.openai.errors import OpenAIError, invalid
from serving.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)

_MAX_STOP_STRINGS = 64
_MAX_PROMPTS = 1024
_PATH = re.compile(r" - at `\$\.?(.*?)`$")

T = TypeVar("T")


def decode_chat(body: bytes) -> ChatCompletionRequest:
    """A chat request.  Raises OpenAIError 400 for what is malformed, contradicts itself or is not supported."""
    request = _decode(body, ChatCompletionRequest)
    if not request.messages and request.prompt_token_ids is None:
        raise invalid("messages is empty; send at least one message.", param="messages")
    for place, message in enumerate(request.messages):
        _check_message(message, f"messages[{place}]")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", param="top_logprobs")
    _check_chat_features(request)
    _check_common(request)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """A completion request.  Raises OpenAIError 400, as `decode_chat` does."""
    request = _decode(body, CompletionRequest)
    if request.suffix:
        raise invalid("suffix is not supported; leave it out.", param="suffix")
    if request.echo and request.logprobs is not None:
        raise invalid("echo with logprobs is not supported; ask for one of them.", param="echo")
    if request.prompt_token_ids is None:
        prompts(request)
    _check_common(request)
    return request


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """A /tokenize request.  Raises OpenAIError 400."""
    request = _decode(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages.", param="prompt")
    for place, message in enumerate(request.messages or ()):
        _check_message(message, f"messages[{place}]")
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """A /detokenize request.  Raises OpenAIError 400."""
    return _decode(body, DetokenizeRequest)


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion, one or several, each a text or token ids.

    `prompt_token_ids`, when given, is the only one.  Raises OpenAIError 400.
    """
    if request.prompt_token_ids is not None:
        return [_token_prompt(request.prompt_token_ids, "prompt_token_ids")]
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        what = "is missing" if prompt is None else f"is of type {type(prompt).__name__}"
        raise invalid(f"prompt {what}; send a string, a list of token ids, or a list of either.", param="prompt")
    if not prompt:
        raise invalid("prompt is an empty list; send at least one prompt.", param="prompt")
    if not isinstance(prompt[0], str | list):
        return [_token_prompt(prompt, "prompt")]
    if len(prompt) > _MAX_PROMPTS:
        raise invalid(f"prompt holds {len(prompt)} prompts; the limit is {_MAX_PROMPTS}.", param="prompt")
    return [_one_prompt(entry, f"prompt[{place}]") for place, entry in enumerate(prompt)]


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _PATH.search(message)
        path = found.group(1) if found else None
        if path is None and (absent := re.search(r"missing required field `(\w+)`", message)):
            path = absent.group(1)
        what = _PATH.sub("", message)
        raise invalid(f"{path}: {what}." if path else f"{what}.", param=path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from error


def _one_prompt(entry: Any, path: str) -> str | list[int]:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, list):
        raise invalid(f"{path} is neither a string nor a list of token ids.", param=path)
    return _token_prompt(entry, path)


def _token_prompt(entry: list[Any], path: str) -> list[int]:
    if not entry:
        raise invalid(f"{path} is empty; a prompt needs at least one token.", param=path)
    for place, token in enumerate(entry):
        if type(token) is not int or not 0 <= token < 2**31:
            raise invalid(f"{path}[{place}] is {token!r}; token ids are integers from 0.", param=f"{path}[{place}]")
    return entry


def _check_message(message: dict[str, Any], path: str) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid(f"{path}.role must be a string such as 'user', not {role!r}.", param=f"{path}.role")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(f"{path}.content must be a string or a list of parts.", param=f"{path}.content")
    for place, part in enumerate(content):
        at = f"{path}.content[{place}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(f"{at} must be an object with a type.", param=at)
        if part["type"] != "text":
            raise invalid(f"{at}.type is {part['type']!r}; this model takes text only.", param=f"{at}.type")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{at}.text must be a string.", param=f"{at}.text")


def _check_chat_features(request: ChatCompletionRequest) -> None:
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise invalid(f"response_format.type is {kind!r}; only 'text' is supported.", param="response_format.type")
    if request.tool_choice not in (None, "auto", "none"):
        raise invalid(
            "tool_choice must be 'auto' or 'none': the answer cannot be forced to be a tool call.",
            param="tool_choice",
        )
    if request.echo:
        raise invalid("echo is for /v1/completions; leave it out.", param="echo")


def _check_common(request: SamplingFields) -> None:
    stops = request.stop_strings
    if len(stops) > _MAX_STOP_STRINGS:
        raise invalid(f"stop holds {len(stops)} strings; the limit is {_MAX_STOP_STRINGS}.", param="stop")
    for place, stop in enumerate(stops):
        if not stop:
            raise invalid("stop strings must not be empty.", param=f"stop[{place}]")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of must equal n: candidates are not ranked here.", param="best_of")
    if request.prompt_token_ids is not None and not request.prompt_token_ids:
        raise invalid("prompt_token_ids is empty; a prompt needs at least one token.", param="prompt_token_ids")
    most = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if most is not None and (request.min_tokens or 0) > most:
        raise invalid(f"min_tokens ({request.min_tokens}) is more than max_tokens ({most}).", param="min_tokens")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true.", param="stream_options")


__all__ = ["OpenAIError", "decode_chat", "decode_completion", "decode_detokenize", "decode_tokenize", "prompts"]
