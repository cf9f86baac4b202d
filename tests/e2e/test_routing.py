"""Real workers behind a real router: prompts find their prefix, and what is promised is delivered."""

import asyncio
from typing import Any

import aiohttp

from .processes import MODEL, Answer, Fleet, chat, heard


def page(topic: str) -> str:
    """Some 190 tokens that begin differently for every topic."""
    return f"{topic}: " + f"this page tells about {topic}, one thing after the other, with care and in order. " * 10


def about(topic: str, question: str) -> list[dict[str, str]]:
    """A conversation that begins with the page of a topic."""
    return [{"role": "system", "content": page(topic)}, {"role": "user", "content": question}]


async def test_prompts_with_the_same_beginning_go_to_the_same_worker(client: aiohttp.ClientSession) -> None:
    first = await chat(client, about("rivers", "What is it about?"))
    assert first.overlap_blocks == first.cached_tokens == 0
    await heard(client, about("rivers", "?"), 8)
    answers = [await chat(client, about("rivers", f"Question {number}?")) for number in range(3)]
    assert {answer.worker for answer in answers} == {first.worker}
    for answer in answers:
        assert answer.overlap_blocks >= 8
        assert answer.agrees, answer


async def test_prompts_with_different_beginnings_spread_over_the_workers(client: aiohttp.ClientSession) -> None:
    topics = ("mountains", "harbours", "deserts", "islands", "forests", "valleys")
    answers = await asyncio.gather(*(chat(client, about(topic, "What is it about?")) for topic in topics))
    assert {answer.worker for answer in answers} == {"a", "b"}
    assert all(answer.agrees for answer in answers)


async def test_a_follow_up_overlaps_the_answer_before_it(client: aiohttp.ClientSession) -> None:
    messages = about("castles", "Tell me more about it.")
    first = await chat(client, messages, max_tokens=40)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    prompt_blocks = first.prompt_tokens // 16
    await heard(client, messages, prompt_blocks + 1)
    second = await chat(client, messages)
    assert second.worker == first.worker
    assert second.overlap_blocks > prompt_blocks
    assert second.agrees, second


async def test_a_worker_chosen_by_force_computes_what_it_does_not_hold_and_answers_the_same(
    client: aiohttp.ClientSession,
) -> None:
    messages = about("bridges", "What is it about?")
    answers: list[Answer] = [await chat(client, messages, worker=name, max_tokens=12) for name in ("a", "b")]
    assert [answer.worker for answer in answers] == ["a", "b"]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert answers[0].text == answers[1].text


async def test_asking_for_the_route_tells_what_a_request_then_does(client: aiohttp.ClientSession) -> None:
    messages = about("windmills", "What is it about?")
    await chat(client, messages)
    await heard(client, messages, 8)
    async with client.post("/v1/route", json={"model": MODEL, "messages": messages}) as response:
        route: dict[str, Any] = await response.json()
    answer = await chat(client, messages)
    chosen = next(row for row in route["candidates"] if row["worker"] == route["worker"])
    assert answer.worker == route["worker"]
    assert answer.overlap_blocks == chosen["overlap_blocks"]
    assert answer.prompt_tokens == route["prompt_tokens"]
    assert {row["worker"] for row in route["candidates"]} == {"a", "b"}


async def test_the_router_follows_both_workers_exactly(client: aiohttp.ClientSession, shared_fleet: Fleet) -> None:
    await chat(client, about("lakes", "What is it about?"))
    async with client.get("/debug/workers") as response:
        rows = (await response.json())["workers"]
    assert {row["worker"] for row in rows} == set(shared_fleet.workers)
    for row in rows:
        for source in row["sources"].values():
            assert source["gaps"] == 0
            assert source["indexed_blocks"] == source["blocks"]


async def error_of(client: aiohttp.ClientSession, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    """(status, error object)."""
    async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, (await response.json())["error"]


async def test_an_unknown_model_is_404_in_openais_form(client: aiohttp.ClientSession) -> None:
    status, error = await error_of(client, {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]})
    assert status == 404
    assert error["code"] == "model_not_found"
    assert "nobody" in error["message"]


async def test_a_prompt_that_is_too_long_is_400_with_both_numbers(client: aiohttp.ClientSession) -> None:
    status, error = await error_of(client, {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9000}]})
    assert status == 400
    assert "8192" in error["message"]
    assert any(int(word) > 9000 for word in error["message"].replace(",", " ").split() if word.isdigit())


async def test_an_unknown_worker_by_force_is_an_error_that_names_the_known_ones(client: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    status, error = await error_of(client, body, **{"x-warmroute-worker": "zzz"})
    assert status in (400, 404)
    assert "zzz" in error["message"]
