"""Answers have OpenAI's form, whole and streamed, and say the same both ways."""

import asyncio
from typing import Any

import pytest

from serving.tokenizer import Tokenizer
from worker.models import Model

from ..conftest import Serve
from ..world import Scripted, Served, prompt_of

MESSAGES = [{"role": "user", "content": "Hello there"}]


async def test_a_completion_has_every_part(served: Served) -> None:
    answer = await served.complete("One two three", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_chat_has_every_part(served: Served) -> None:
    status, answer = await served.post(
        "/v1/chat/completions", messages=MESSAGES, max_completion_tokens=4, temperature=0
    )
    assert status == 200
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert answer["usage"]["completion_tokens"] == 4


async def test_a_streamed_chat_is_the_whole_one_in_parts(served: Served) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    _, whole = await served.post("/v1/chat/completions", **body)
    chunks = await served.stream("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(c["delta"].get("content", "") for c in deltas) == whole["choices"][0]["message"]["content"]
    assert [c["finish_reason"] for c in deltas] == [None] * (len(deltas) - 1) + ["length"]


async def test_without_include_usage_no_chunk_speaks_of_usage(served: Served) -> None:
    chunks = await served.stream("/v1/completions", prompt="One", max_tokens=4)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_every_chunk_can_carry_the_usage_so_far(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await served.stream("/v1/completions", prompt="One", max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_a_batch_of_prompts_gives_each_its_choices(served: Served) -> None:
    prompts = [prompt_of(5, seed=1), prompt_of(9, seed=2)]
    answer = await served.complete(prompts, max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1] == (await served.complete(prompts[0], max_tokens=4))["choices"][0]["text"]
    assert texts[2] == texts[3] == (await served.complete(prompts[1], max_tokens=4))["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 14
    assert answer["usage"]["completion_tokens"] == 16


async def test_the_choices_of_a_stream_can_be_told_apart(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "One", "max_tokens": 6, "n": 3, "seed": 4, "temperature": 1.0}
    whole = await served.complete(**body)
    texts = {0: "", 1: "", 2: ""}
    for chunk in await served.stream("/v1/completions", **body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    assert len(set(texts.values())) == 3


async def test_echo_puts_the_prompt_before_the_answer(served: Served) -> None:
    plain = await served.complete("One two", max_tokens=3)
    echoed = await served.complete("One two", max_tokens=3, echo=True)
    assert echoed["choices"][0]["text"] == "One two" + plain["choices"][0]["text"]
    chunks = await served.stream("/v1/completions", prompt="One two", max_tokens=3, echo=True, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["choices"][0]["text"]


async def test_completion_logprobs_lie_beside_the_text(served: Served) -> None:
    answer = await served.complete("One two", max_tokens=4, logprobs=2, min_p=0.0)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == 4
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert value <= 0
        assert top[token] == value == max(top.values())


async def test_chat_logprobs_tell_bytes_and_likely_tokens(served: Served) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    _, answer = await served.post("/v1/chat/completions", **body)
    told = answer["choices"][0]["logprobs"]["content"]
    assert len(told) == 5
    text = b"".join(bytes(entry["bytes"]) for entry in told).decode("utf-8", "replace")
    assert text == answer["choices"][0]["message"]["content"]
    for entry in told:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    chunks = await served.stream("/v1/chat/completions", **body)
    streamed = [e for c in chunks for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert streamed == told


async def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(served: Served) -> None:
    body: dict[str, Any] = {"prompt": prompt_of(11), "max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "seed": 21}
    alone = await served.complete(**body)
    crowd = [served.complete(prompt_of(7 + n, seed=n), max_tokens=16, temperature=1.0) for n in range(6)]
    together = (await asyncio.gather(served.complete(**body), *crowd))[0]
    assert together["choices"][0]["text"] == alone["choices"][0]["text"]
    other = await served.complete(**body | {"seed": 22})
    assert other["choices"][0]["text"] != alone["choices"][0]["text"]


async def test_a_stop_string_is_cut_off_in_a_stream_too(served: Served) -> None:
    whole = (await served.complete("One", max_tokens=12))["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:3]
    stopped = (await served.complete("One", max_tokens=12, stop=[stop]))["choices"][0]
    assert stopped["text"] == whole[: whole.index(stop)]
    assert stopped["finish_reason"] == "stop"
    chunks = await served.stream("/v1/completions", prompt="One", max_tokens=12, stop=stop, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == stopped["text"]


async def test_prompt_token_ids_replace_the_text(served: Served) -> None:
    tokens = served.worker.tokenizer.encode("One two three")
    text = await served.complete("One two three", max_tokens=4)
    given = await served.complete("something else", max_tokens=4, prompt_token_ids=tokens)
    assert given["choices"][0]["text"] == text["choices"][0]["text"]
    assert given["usage"]["prompt_tokens"] == len(tokens)
    _, chat = await served.post(
        "/v1/chat/completions", messages=MESSAGES, prompt_token_ids=tokens, max_tokens=4, temperature=0
    )
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]


async def test_the_second_turn_is_cached_through_the_generated_tokens(served: Served) -> None:
    prompt = prompt_of(21)
    size = served.worker.config.block_size_tokens
    first = await served.complete(prompt, max_tokens=45, logprobs=0, ignore_eos=True)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = served.worker.engine.core.context.kv_block_allocator.get_evictable_block_count()
    assert answer == (21 + 44) // size, "whole blocks of prompt and answer are kept"
    again = await served.complete(prompt, max_tokens=45, ignore_eos=True)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 21 // size * size


async def test_a_salted_prompt_is_not_shared(served: Served) -> None:
    prompt = prompt_of(40)
    await served.complete(prompt, max_tokens=2, cache_salt="mine")
    again = await served.complete(prompt, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_sixteen_streams_at_once_all_come_to_their_end(serve: Serve) -> None:
    async with serve(max_tokens=32) as served:

        async def one(n: int) -> str:
            chunks = await served.stream(
                "/v1/completions", prompt=prompt_of(5 + 7 * n, seed=n), max_tokens=20, temperature=0, ignore_eos=True
            )
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        together = await asyncio.gather(*(one(n) for n in range(16)))
        await served.idle()
        assert together == [await one(n) for n in range(16)]


@pytest.mark.parametrize("text", ["naïve café – œuvre", "日本語のテキスト", "👩‍🚀 and 🏳️‍🌈!"])
async def test_a_stream_never_splits_a_character(serve: Serve, tiny: Model, tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens), "the test needs characters across tokens"
    async with serve(model=Scripted(tiny, 3, tokens)) as served:
        body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": len(tokens), "temperature": 0}
        chunks = await served.stream("/v1/completions", **body)
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        cut = await served.complete(**body | {"max_tokens": len(tokens) - 1})
        assert cut["choices"][0]["text"] == tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The end. STOP here", "STOP", "The end. "),
        ("Question: why?\n\nAnswer: so", "\n\nAnswer", "Question: why?"),
        ("ein Äpfelchen", "Äpfel", "ein "),
        ("almost STO", "STOP", "almost STO"),
    ],
)
async def test_a_stop_string_ends_the_answer_wherever_tokens_are_cut(
    serve: Serve, tiny: Model, tokenizer: Tokenizer, text: str, stop: str, expected: str
) -> None:
    tokens = tokenizer.encode(text)
    async with serve(model=Scripted(tiny, 3, tokens)) as served:
        body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": len(tokens), "temperature": 0, "stop": stop}
        whole = (await served.complete(**body))["choices"][0]
        assert whole["text"] == expected
        assert whole["finish_reason"] == ("length" if expected == text else "stop")
        chunks = await served.stream("/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        kept = (await served.complete(**body, include_stop_str_in_output=True))["choices"][0]
        assert kept["text"] == (expected + stop if expected != text else text)
