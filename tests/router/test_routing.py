"""End to end through HTTP and NATS: where prompts go, what the headers say, what reaches the worker."""

import asyncio
import json
from collections import Counter
from typing import Any

from .conftest import MakeWorld
from .standin import MODEL, StandIn, chat_text, text_ids, until


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def test_the_same_prefix_goes_to_the_worker_that_holds_it(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    prompt = "the quick brown fox jumps over the lazy dog " * 20
    first = await world.post("/v1/chat/completions", chat(prompt))
    await world.indexed()
    for number in range(6):
        answer = await world.post("/v1/chat/completions", chat(prompt + str(number) * 40))
        assert answer.headers["x-warmroute-worker"] == first.headers["x-warmroute-worker"]
        overlap = int(answer.headers["x-warmroute-overlap-blocks"])
        cached = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert overlap * 16 == cached > 800
        await world.indexed()
    await world.quiet()


async def test_different_prompts_sent_one_at_a_time_spread(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    shares: Counter[str] = Counter()
    for number in range(100):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number:4}" * 50})
        shares[answer.headers["x-warmroute-worker"]] += 1
    assert 35 <= shares["a"] <= 65
    await world.quiet()


async def test_prompts_without_a_full_block_spread(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    shares: Counter[str] = Counter()
    for _ in range(60):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": "hello"})
        assert answer.headers["x-warmroute-prompt-blocks"] == "0"
        shares[answer.headers["x-warmroute-worker"]] += 1
    assert min(shares["a"], shares["b"]) >= 18


async def test_a_forced_worker_gets_the_prompt_and_an_unknown_one_is_refused(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    for _ in range(5):
        answer = await world.post("/v1/chat/completions", chat("x" * 200), {"x-warmroute-worker": "b"})
        assert answer.headers["x-warmroute-worker"] == "b"
        assert "forced" in answer.headers["x-warmroute-reason"]
    refused = await world.post("/v1/chat/completions", chat("x"), {"x-warmroute-worker": "zz"})
    assert refused.status == 404
    assert "zz" in (await refused.json())["error"]["message"]
    await world.quiet()


async def test_the_body_is_forwarded_byte_for_byte_with_token_ids_spliced_in(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    body = (
        b'{ "model":"stand-in",\n "messages": [{"role":"user","content":"h\\u00e9llo \xf0\x9f\x98\x80"}],'
        b'  "unknown_field": {"z":1, "a": 1e3},"temperature":0.10 } \n'
    )
    await world.post("/v1/chat/completions", body)
    received = world.workers[0].received[0].body
    ids = text_ids(chat_text(json.loads(body)["messages"]))
    cut = body.rindex(b"}")
    spliced = b',"prompt_token_ids":' + json.dumps(ids, separators=(",", ":")).encode()
    assert received == body[:cut] + spliced + body[cut:]


async def test_other_engines_get_identical_bytes(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a", features=()))
    body = b'{"model":"stand-in",  "prompt":"abc", "logit_bias":{"5":1}}  '
    await world.post("/v1/completions", body, {"authorization": "Bearer k", "x-request-id": "r-1"})
    received = world.workers[0].received[0]
    assert received.body == body
    assert received.headers["Authorization"] == "Bearer k"
    assert received.headers["x-request-id"] == "r-1"


async def test_route_agrees_with_the_headers_and_sends_nothing(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    body = chat("tell me a story " * 30)
    await world.post("/v1/chat/completions", body, {"x-warmroute-worker": "b"})
    await world.indexed()
    before = world.router.ledger.totals()
    told = await (await world.post("/v1/route", body)).json()
    assert world.router.ledger.totals() == before
    answer = await world.post("/v1/chat/completions", body)
    chosen = next(c for c in told["candidates"] if c["worker"] == told["worker"])
    assert told["worker"] == answer.headers["x-warmroute-worker"] == "b"
    assert str(chosen["overlap_blocks"]) == answer.headers["x-warmroute-overlap-blocks"]
    assert str(told["prompt_blocks"]) == answer.headers["x-warmroute-prompt-blocks"]
    assert f"{chosen['score']:.1f}" == answer.headers["x-warmroute-score"]
    assert len(told["candidates"]) == 2
    assert len(world.workers[0].received) == 0


async def test_route_takes_plain_token_ids(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    told = await (await world.post("/v1/route", {"model": MODEL, "prompt_token_ids": list(range(100))})).json()
    assert (told["prompt_tokens"], told["prompt_blocks"]) == (100, 6)


async def test_siblings_of_a_burst_meet_on_one_worker_before_any_event(make_world: MakeWorld) -> None:
    count = 40
    world = await make_world(StandIn("a"), StandIn("b"))
    for worker in world.workers:
        worker.behaviour = "hold"
    prompt = "a long shared document " * 100
    asked = [
        asyncio.create_task(world.post("/v1/completions", {"model": MODEL, "prompt": prompt + f"{n:3}"}))
        for n in range(count)
    ]
    await until(lambda: sum(len(w.received) for w in world.workers) == count, f"{count} requests at the workers")
    for worker in world.workers:
        worker.release.set()
    shares = Counter([(await answer).headers["x-warmroute-worker"] for answer in asked])
    assert max(shares.values()) >= 0.9 * count
    await world.quiet()


async def test_unknown_model_too_long_prompt_and_bad_bodies_are_told_in_openai_form(
    make_world: MakeWorld,
) -> None:
    world = await make_world(StandIn("a", max_length=100))
    unknown = await world.post("/v1/chat/completions", {"model": "gpt-x", "messages": []})
    assert unknown.status == 404
    assert MODEL in (await unknown.json())["error"]["message"]
    long = await world.post("/v1/completions", {"model": MODEL, "prompt": "x" * 150})
    assert long.status == 400
    message = (await long.json())["error"]["message"]
    assert "150" in message
    assert "100" in message
    bad = await world.post("/v1/completions", b'{"model": "stand-in", "prompt": [1, "x"]}')
    assert bad.status == 400
    assert "prompt[1]" in (await bad.json())["error"]["message"]
    assert world.workers[0].received == []


async def test_models_workers_sources_and_health_tell_what_is_known(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b", block_size=32))
    await world.post("/v1/completions", {"model": MODEL, "prompt": "y" * 64}, {"x-warmroute-worker": "a"})
    await world.indexed()

    async def get(path: str) -> Any:
        response = await world.client.get(world.address + path)
        return response.status, await response.read()

    models = json.loads((await get("/v1/models"))[1])
    assert [row["id"] for row in models["data"]] == [MODEL]
    workers = {row["worker"]: row for row in json.loads((await get("/debug/workers"))[1])["workers"]}
    assert workers["a"]["takes_prompts"]
    assert workers["a"]["sources"]["0"]["indexed_blocks"] == 4
    assert workers["b"]["block_size"] == 32
    assert len(json.loads((await get("/v1/sources"))[1])["sources"]) == 2
    assert (await get("/live"))[0] == (await get("/health"))[0] == (await get("/ready"))[0] == 200
    metrics = (await get("/metrics"))[1].decode()
    assert 'warmroute_router_index_blocks{block_size="16",model="stand-in"} 4.0' in metrics
    assert 'warmroute_router_worker_ready{worker="b"} 1.0' in metrics


async def test_a_prompt_that_cannot_be_hashed_is_routed_by_load_counted_and_said(
    make_world: MakeWorld,
) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    shares: Counter[str] = Counter()
    for _ in range(40):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": ["several", "prompts"]})
        assert "several prompts" in answer.headers["x-warmroute-reason"]
        shares[answer.headers["x-warmroute-worker"]] += 1
    assert min(shares["a"], shares["b"]) >= 8
    assert world.router.reader.failures == {"not_text": 40}


async def test_a_decision_can_be_looked_up_with_what_was_promised_and_delivered(
    make_world: MakeWorld,
) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    body = chat("once upon a time " * 30)
    await world.post("/v1/chat/completions", body)
    await world.indexed()
    await world.post("/v1/chat/completions", body, {"x-request-id": "mine"})
    receipt = await (await world.client.get(world.address + "/v1/decisions/mine")).json()
    assert receipt["promised_tokens"] == receipt["delivered_tokens"] == receipt["available_tokens"] > 400
    assert len(receipt["candidates"]) == 2
    last = await (await world.client.get(world.address + "/debug/decisions?n=1")).json()
    assert [row["request_id"] for row in last["decisions"]] == ["mine"]
    assert (await world.client.get(world.address + "/v1/decisions/unknown")).status == 404


async def test_who_holds_a_prompt_is_told_for_every_worker(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    body = {"model": MODEL, "prompt": "z" * 160}
    await world.post("/v1/completions", body, {"x-warmroute-worker": "b"})
    await world.indexed()
    told = await (await world.post("/debug/prefix", body)).json()
    assert {row["worker"]: row["overlap_blocks"] for row in told["holders"]} == {"a": 0, "b": 10}


async def test_an_operator_drains_a_worker_and_brings_it_back(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    drain = world.address + "/v1/workers/a/drain"
    assert (await (await world.client.post(drain)).json())["why_not"] == "drained by an operator"
    for number in range(10):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number}" * 40})
        assert answer.headers["x-warmroute-worker"] == "b"
    assert (await (await world.client.delete(drain)).json())["takes_prompts"]
    assert (await world.client.post(world.address + "/v1/workers/zz/drain")).status == 404
