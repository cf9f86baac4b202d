"""The real model over HTTP: sensible English, true cached tokens, and OpenAI's own client."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from ..world import Served

FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(real: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{real.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_chat_answers_and_streams_the_same(client: openai.AsyncOpenAI, real: Served) -> None:
    whole = await client.chat.completions.create(model=real.model, messages=FRANCE, max_tokens=20, temperature=0)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert "<|" not in text
    stream = await client.chat.completions.create(
        model=real.model, messages=FRANCE, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    pieces, usage = [], None
    async for chunk in stream:
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == text
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 32


async def test_the_next_turn_reuses_the_generated_answer(client: openai.AsyncOpenAI, real: Served) -> None:
    first = await client.chat.completions.create(
        model=real.model, messages=FRANCE, max_tokens=60, temperature=0, extra_body={"min_tokens": 30}
    )
    assert first.usage is not None
    answer = first.choices[0].message.content or ""
    messages: list[ChatCompletionMessageParam] = [
        *FRANCE, {"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"},
    ]  # fmt: skip
    second = await client.chat.completions.create(
        model=real.model, messages=messages, max_tokens=12, temperature=0, logprobs=True
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached % 16 == 0
    assert first.usage.prompt_tokens < cached < second.usage.prompt_tokens
    real.worker.engine.core.context.reset()
    cold = await client.chat.completions.create(
        model=real.model, messages=messages, max_tokens=12, temperature=0, logprobs=True
    )
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert cold.choices[0].message.content == second.choices[0].message.content
    assert cold.choices[0].logprobs is not None
    assert second.choices[0].logprobs is not None
    for one, other in zip(
        cold.choices[0].logprobs.content or (), second.choices[0].logprobs.content or (), strict=True
    ):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_a_completion_with_several_choices(client: openai.AsyncOpenAI, real: Served) -> None:
    answer = await client.completions.create(
        model=real.model, prompt="The capital of France is", max_tokens=5, temperature=0.8, n=3, seed=1, logprobs=1
    )
    assert len({choice.text for choice in answer.choices}) > 1
    again = await client.completions.create(
        model=real.model, prompt="The capital of France is", max_tokens=5, temperature=0.8, n=3, seed=1
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in answer.choices]


async def test_errors_reach_the_client_as_its_own_exceptions(client: openai.AsyncOpenAI, real: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=FRANCE)
    with pytest.raises(openai.BadRequestError, match=f"exceeds the {real.worker.max_length} tokens"):
        await client.completions.create(model=real.model, prompt="x", max_tokens=9000)
