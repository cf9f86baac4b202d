"""What the router reads of a client's request; everything else in the body passes through unread."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from serving.openai import OpenAIError


class _Body(msgspec.Struct):
    """The fields that decide where a request goes.  Unknown ones are tolerated, and forwarded."""

    model: str
    stream: bool | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None
    prompt_token_ids: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class RoutedRequest:
    """A request's model and prompt in the form in which they can be tokenised.

    Exactly one of `messages`, `text`, `token_ids` and `why_unhashable` is set.
    """

    model: str
    stream: bool
    size: int
    """Bytes of the body: the measure for what is long."""
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: NDArray[np.uint32] | None = None
    why_unhashable: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    template_arguments: dict[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    has_token_ids: bool = False
    """The body carries `prompt_token_ids`; it is forwarded as it is."""

    def tokenize_body(self) -> dict[str, Any]:
        """The body of a worker's POST /tokenize for this prompt."""
        body: dict[str, Any] = {"model": self.model}
        if self.messages is not None:
            body |= {"messages": self.messages, "add_generation_prompt": self.add_generation_prompt}
            if self.tools is not None:
                body["tools"] = self.tools
            if self.template_arguments:
                body["chat_template_kwargs"] = self.template_arguments
        else:
            body |= {"prompt": self.text, "add_special_tokens": self.add_special_tokens}
        return body


def read_request(body: bytes) -> RoutedRequest:
    """Read a chat or completion request.

    Raises OpenAIError 400 that names the field for anything that is not one.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OpenAIError(
            400,
            f"The request body is not valid: {error}.",
            type="invalid_request_error",
            code=None,
            param=None,
        ) from error
    request = RoutedRequest(
        fields.model,
        bool(fields.stream),
        len(body),
        tools=fields.tools,
        cache_salt=fields.cache_salt or "",
        has_token_ids=fields.prompt_token_ids is not None,
    )
    if fields.prompt_token_ids is not None:
        request.token_ids = _checked_ids(fields.prompt_token_ids, "prompt_token_ids")
    elif fields.messages is not None:
        _read_messages(request, fields)
    else:
        _read_prompt(request, fields)
    return request


def _read_messages(request: RoutedRequest, fields: _Body) -> None:
    if any(_has_media(message.get("content")) for message in fields.messages or ()):
        request.why_unhashable = "the prompt carries parts other than text"
        return
    request.messages = fields.messages
    request.template_arguments = fields.chat_template_kwargs or {}
    if fields.add_generation_prompt is not None:
        request.add_generation_prompt = fields.add_generation_prompt


def _read_prompt(request: RoutedRequest, fields: _Body) -> None:
    """A text, a list of token ids, or a batch: of one it is taken, of several the router sees load only."""
    prompt = fields.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        request.text = prompt
        if fields.add_special_tokens is not None:
            request.add_special_tokens = fields.add_special_tokens
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        request.why_unhashable = "a list of several prompts"
    elif isinstance(prompt, list) and prompt:
        request.token_ids = _checked_ids(prompt, "prompt")
    else:
        raise OpenAIError(
            400,
            "The request has no prompt: give `messages`, or `prompt` as a string or a list of token ids.",
            type="invalid_request_error",
            code=None,
            param="messages" if prompt is None else "prompt",
        )


def _checked_ids(ids: list[Any], name: str) -> NDArray[np.uint32]:
    """Token ids as an array; a whole array is checked at once, and only a bad one is searched for its first
    fault.
    """
    if not ids:
        return np.empty(0, np.uint32)
    with suppress(ValueError, OverflowError):
        array = np.array(ids)
        if array.dtype.kind == "i" and array.ndim == 1 and array.min() >= 0 and array.max() < 2**32:
            return array.astype(np.uint32)
    position = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < 2**32)
    raise OpenAIError(
        400,
        f"{name}[{position}] is {ids[position]!r}; a token id is a whole number from 0 to {2**32 - 1}.",
        type="invalid_request_error",
        code=None,
        param=name,
    )


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(
        not (isinstance(part, dict) and part.get("type", "text") == "text") for part in content
    )
