"""Requests are decoded with every field, and refusals name the field's path."""

import json
from typing import Any

import pytest

from serving.openai import OpenAIError, decode_chat, decode_completion, decode_tokenize, prompts

MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "Hello", **fields}).encode()


def refusal(call: Any, body: bytes) -> dict[str, Any]:
    with pytest.raises(OpenAIError) as caught:
        call(body)
    assert caught.value.status == 400
    error: dict[str, Any] = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def test_every_sampling_field_is_read() -> None:
    request = decode_chat(
        chat(
            temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=-1,
            frequency_penalty=1.5, logit_bias={"42": -100}, seed=7, stop=["a", "b"], stop_token_ids=[3],
            max_completion_tokens=9, min_tokens=2, ignore_eos=True, n=2, stream=True,
            stream_options={"include_usage": True}, logprobs=True, top_logprobs=3, user="u",
            tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="auto",
        )
    )  # fmt: skip
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 40, 0.9, 0.05)
    assert (request.repetition_penalty, request.presence_penalty, request.frequency_penalty) == (1.1, -1, 1.5)
    assert request.logit_bias == {42: -100}
    assert request.stop_strings == ["a", "b"]
    assert (request.seed, request.max_completion_tokens, request.min_tokens, request.n) == (7, 9, 2, 2)
    assert request.includes_usage


def test_null_means_default_and_unknown_fields_are_tolerated() -> None:
    request = decode_chat(chat(temperature=None, stop=None, stream_options=None, n=None, from_the_future=[1]))
    assert request.temperature is None
    assert request.stop_strings == []


def test_content_may_be_a_list_of_text_parts_or_absent() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert decode_chat(chat(messages=messages)).messages == messages


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat(temperature="hot"), "temperature"),
        (chat(temperature=-0.1), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(n=0), "n"),
        (chat(stop_token_ids=[1, -2]), "stop_token_ids[1]"),
        (chat(stream_options={"include_usage": 3}, stream=True), "stream_options.include_usage"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(min_tokens=5, max_tokens=4), "min_tokens"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"content": "x"}]), "messages[0].role"),
        (chat(messages=[*MESSAGES, {"role": "user", "content": 5}]), "messages[1].content"),
        (
            chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "messages[0].content[0].type",
        ),
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(response_format={"type": "json_object"}), "response_format.type"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(stop=["x", ""]), "stop[1]"),
        (chat(best_of=3), "best_of"),
        (chat(prompt_token_ids=[]), "prompt_token_ids"),
        (json.dumps({"messages": MESSAGES}).encode(), "model"),
    ],
)
def test_a_refused_chat_names_the_field(body: bytes, path: str) -> None:
    error = refusal(decode_chat, body)
    assert error["param"] == path
    assert error["message"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 2]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_refused_completion_names_the_field(fields: dict[str, Any], path: str) -> None:
    assert refusal(decode_completion, completion(**fields))["param"] == path


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_every_form_of_prompt_is_understood(prompt: Any, expected: Any) -> None:
    assert prompts(decode_completion(completion(prompt=prompt))) == expected


def test_token_ids_of_the_extension_replace_the_prompt() -> None:
    assert prompts(decode_completion(completion(prompt_token_ids=[5, 6]))) == [[5, 6]]
    assert decode_chat(chat(prompt_token_ids=[5, 6])).prompt_token_ids == [5, 6]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[1]", b'"x"', b"null"])
def test_what_is_no_request_is_a_clear_error(body: bytes) -> None:
    assert refusal(decode_chat, body)["message"]


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert decode_tokenize(b'{"prompt": "x"}').prompt == "x"
    assert refusal(decode_tokenize, b"{}")["param"] == "prompt"
