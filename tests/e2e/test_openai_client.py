"""OpenAI's own Python client against worker and router, streaming and not."""

from collections.abc import Iterator

import openai
import pytest

from .processes import MODEL, Fleet

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(params=["router", "worker"])
def sdk(request: pytest.FixtureRequest, shared_fleet: Fleet) -> Iterator[openai.OpenAI]:
    """The client, pointed at the router or at a worker."""
    address = shared_fleet.router if request.param == "router" else shared_fleet.workers["a"].address
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_chat_streamed(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=QUESTION,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    whole = sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens > 0


def test_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=6, temperature=0)
    assert "Paris" in answer.choices[0].text


def test_completion_streamed(sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=6, temperature=0, stream=True
    )
    assert "Paris" in "".join(choice.text for chunk in stream for choice in chunk.choices)


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]


def test_an_error_arrives_as_the_clients_own_exception(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        sdk.chat.completions.create(model="nobody", messages=QUESTION)  # type: ignore[arg-type]
