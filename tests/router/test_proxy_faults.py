"""Faults on the way: dead, refusing and dying workers, clients that leave, slow clients; and every promise
is returned.
"""

import asyncio
import json

import pytest

from .conftest import Broker, MakeWorld
from .standin import MODEL, StandIn, until


def stream(prompt: str = "p" * 100) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "stream": True}


@pytest.mark.parametrize("behaviour", ["503", "die"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_another_worker_answers_when_the_first_fails_before_its_first_byte(
    make_world: MakeWorld, behaviour: str, streaming: bool
) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    world.workers[0].behaviour = behaviour
    for number in range(20):
        answer = await world.post(
            "/v1/completions", {"model": MODEL, "prompt": f"{number:3}" * 30, "stream": streaming}
        )
        assert answer.status == 200
        assert answer.headers["x-warmroute-worker"] == "b"
    assert 1 <= len(world.workers[0].received) < 20, "tried, then rested by its breaker"
    await world.quiet()


async def test_another_worker_answers_when_the_first_refuses_connections(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    await world.workers[0].stop_listening()
    for number in range(10):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number:3}" * 30})
        assert answer.headers["x-warmroute-worker"] == "b"
    await world.quiet()


async def test_a_worker_that_recovers_is_used_again(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    world.workers[0].behaviour = "503"
    for number in range(12):
        await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number:3}" * 30})
    world.workers[0].behaviour = "ok"
    seen = len(world.workers[0].received)
    number = 100
    while len(world.workers[0].received) < seen + 5:
        number += 1
        assert number < 2000, "the recovered worker gets nothing"
        await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number:4}" * 30})


async def test_no_worker_left_is_503_with_retry_after_and_the_reasons(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    for worker in world.workers:
        worker.behaviour = "503"
    answer = await world.post("/v1/completions", {"model": MODEL, "prompt": "x"})
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    message = json.loads(await answer.read())["error"]["message"]
    assert "a" in message
    assert "b" in message
    await world.quiet()


async def test_a_death_in_mid_stream_ends_the_stream_with_an_error_event(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    world.workers[0].behaviour = "die-mid"
    async with asyncio.timeout(5):
        answer = await world.post("/v1/completions", stream())
    events = [line for line in (await answer.read()).split(b"\n\n") if line]
    assert b'"content": "0"' in events[0]
    error = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert error["code"] == "worker_lost"
    assert "[DONE]" not in (await answer.text())
    await world.quiet()


async def test_a_client_that_leaves_closes_the_worker_side_within_100_ms(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    worker = world.workers[0]
    worker.behaviour = "hold"
    answer = await world.client.post(world.address + "/v1/completions", json=stream())
    assert await answer.content.readany()
    assert world.router.ledger.totals()[0] == 1
    answer.close()
    async with asyncio.timeout(0.1):
        await worker.received[0].gone.wait()
    await world.quiet()


async def test_a_client_that_leaves_before_the_first_byte_frees_everything(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    worker = world.workers[0]
    worker.behaviour = "hold"
    asked = asyncio.create_task(world.post("/v1/completions", {"model": MODEL, "prompt": "z" * 50}))
    await until(lambda: len(worker.received) == 1, "the request is at the worker")
    asked.cancel()
    async with asyncio.timeout(1):
        await worker.received[0].gone.wait()
    await world.quiet()
    assert world.router.in_flight.cancelled == 1


async def test_a_client_that_does_not_read_stops_the_worker_from_sending(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    worker = world.workers[0]
    worker.behaviour = "flood"
    answer = await world.client.post(world.address + "/v1/completions", json=stream())
    sent = -1
    for _ in range(100):
        sent = worker.sent_bytes
        await asyncio.sleep(0.1)
        if sent == worker.sent_bytes > 0:
            break
    assert worker.sent_bytes == sent < 64 * 2**20
    answer.close()
    await world.quiet()


async def test_chunks_pass_as_they_come(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    worker = world.workers[0]
    worker.behaviour = "hold"
    async with world.client.post(world.address + "/v1/completions", json=stream()) as answer:
        async with asyncio.timeout(2):
            first = await answer.content.readany()
        assert b'"content": "0"' in first
        assert b'"content": "1"' not in first
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.headers["X-Engine"] == "stand-in"
        worker.release.set()
        rest = await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    await world.quiet()


async def test_150_slow_requests_are_in_flight_at_once(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    worker = world.workers[0]
    worker.behaviour = "hold"
    asked = [asyncio.create_task(world.post("/v1/completions", {"model": MODEL, "prompt": f"{n}"})) for n in range(150)]
    await until(lambda: len(worker.received) == 150, "150 requests at the worker")
    worker.release.set()
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    await world.quiet()


async def test_a_draining_worker_gets_no_new_prompt(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    world.workers[0].state = "draining"
    world.workers[0].plane.beat_now()
    await until(lambda: len(world.router.fleet.ready(MODEL)) == 1, "the router knows that it drains")
    for number in range(10):
        answer = await world.post("/v1/completions", {"model": MODEL, "prompt": f"{number}" * 20})
        assert answer.headers["x-warmroute-worker"] == "b"


async def test_a_worker_that_says_goodbye_leaves_at_once(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"), StandIn("b"))
    await world.workers[0].plane.stop()
    await until(lambda: len(world.router.fleet.ready(MODEL)) == 1, "the router knows that it stopped", 2)


async def test_a_broken_client_body_is_no_internal_error(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    for body in (b"", b"null", b"[]", b"\x00\xff", b'{"model": null}'):
        answer = await world.post("/v1/chat/completions", body)
        assert answer.status == 400
        assert "error" in await answer.json()


async def test_a_compressed_answer_and_its_label_stay_together(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    world.workers[0].behaviour = "gzip"
    async with world.client.post(
        world.address + "/v1/completions",
        json={"model": MODEL, "prompt": "x"},
        headers={"Accept-Encoding": "gzip"},
    ) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        assert json.loads(await answer.read())["choices"], "the client could unpack it"


async def test_a_broker_that_restarts_leaves_routing_untouched_and_the_index_exact(
    make_world: MakeWorld, broker: Broker
) -> None:
    world = await make_world(StandIn("a"), StandIn("b"), nats=broker.url, grace_s=60.0, lease_s=20.0)
    body = {"model": MODEL, "prompt": "before " * 40}
    first = await world.post("/v1/completions", body)
    await world.indexed()
    broker.stop()
    await until(lambda: not world.router.bus.connected, "the router sees that the bus is away")
    assert world.router.why_not_ready() is not None
    again = await world.post("/v1/completions", body)
    assert again.headers["x-warmroute-worker"] == first.headers["x-warmroute-worker"]
    assert again.headers["x-warmroute-overlap-blocks"] == str(280 // 16)
    for number in range(4):
        await world.post("/v1/completions", {"model": MODEL, "prompt": f"during {number} " * 40})
    broker.start()
    await until(lambda: world.router.bus.connected, "the bus is back")
    await world.indexed()
    world.router.catalog.check_integrity()
    assert world.router.why_not_ready() is None
