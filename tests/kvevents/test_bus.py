"""Both buses keep one contract; the NATS one never makes anybody wait for an outage to end."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvevents.bus import Bus, Incoming, MemoryBus, NatsBus

from .support import NatsServer, until


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        memory = MemoryBus()
        yield memory
        await memory.close()
        return
    server = NatsServer(tmp_path)
    server.start()
    nats = await NatsBus.connect(server.url)
    yield nats
    await nats.close()
    server.kill()


async def test_messages_arrive_in_order_at_matching_subjects_only(bus: Bus) -> None:
    heard: dict[str, list[tuple[str, bytes]]] = {"exact": [], "star": [], "tail": [], "other": []}
    patterns = {"exact": "kv.v1.a.b", "star": "kv.*.a.b", "tail": "kv.v1.>", "other": "kv.v1.a"}
    for name, pattern in patterns.items():
        await bus.subscribe(pattern, lambda m, name=name: heard[name].append((m.subject, m.data)))  # type: ignore[misc]
    sent = [("kv.v1.a.b", bytes([i])) for i in range(50)]
    for subject, data in sent:
        assert await bus.publish(subject, data)
    await until(lambda: len(heard["tail"]) == 50, "all messages")
    assert heard == {"exact": sent, "star": sent, "tail": sent, "other": []}


async def test_an_unsubscribed_handler_hears_nothing_more(bus: Bus) -> None:
    heard: list[bytes] = []
    others: list[bytes] = []
    subscription = await bus.subscribe("s", lambda m: heard.append(m.data))
    await bus.subscribe("s", lambda m: others.append(m.data))
    await bus.publish("s", b"1")
    await until(lambda: len(others) == 1, "the first message")
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await bus.publish("s", b"2")
    await until(lambda: len(others) == 2, "the second message")
    assert heard == [b"1"]


async def test_a_request_is_answered(bus: Bus) -> None:
    answers: list[asyncio.Task[bool]] = []

    def answer(incoming: Incoming) -> None:
        answers.append(asyncio.create_task(bus.publish(incoming.reply, incoming.data[::-1])))

    await bus.subscribe("ask", answer)
    replies = await asyncio.gather(*(bus.request("ask", bytes([i, 0]), 2) for i in range(20)))
    assert replies == [bytes([0, i]) for i in range(20)]


async def test_a_request_that_nobody_answers_times_out(bus: Bus) -> None:
    await bus.subscribe("silent", lambda _: None)
    for subject in ("silent", "nobody"):
        with pytest.raises(TimeoutError):
            await bus.request(subject, b"?", 0.1)


async def test_the_largest_message_fits_and_a_larger_one_does_not_arrive(bus: Bus) -> None:
    heard: list[int] = []
    await bus.subscribe("s", lambda m: heard.append(len(m.data)))
    assert await bus.publish("s", bytes(bus.max_payload))
    assert not await bus.publish("s", bytes(bus.max_payload + 1))
    assert await bus.publish("s", b"after")
    await until(lambda: len(heard) == 2, "the largest, and what follows")
    assert heard == [bus.max_payload, 5]


async def test_max_payload_is_the_servers(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, max_payload=5000)
    server.start()
    bus = await NatsBus.connect(server.url)
    assert bus.max_payload == 5000
    await bus.close()
    server.kill()


async def test_a_handler_that_fails_is_counted_and_does_not_deafen(server: NatsServer) -> None:
    bus = await NatsBus.connect(server.url)
    heard: list[bytes] = []

    def handler(incoming: Incoming) -> None:
        if incoming.data == b"bad":
            raise RuntimeError("a handler's own fault")
        heard.append(incoming.data)

    await bus.subscribe("s", handler)
    for data in (b"bad", b"good"):
        await bus.publish("s", data)
    await until(lambda: heard == [b"good"], "the message after")
    assert bus.handler_failures == 1
    await bus.close()


async def test_an_outage_blocks_nobody_and_ends_with_a_reconnect(server: NatsServer) -> None:
    bus = await NatsBus.connect(server.url)
    heard: list[bytes] = []
    reconnected = asyncio.Event()
    await bus.subscribe("s", lambda m: heard.append(m.data))
    bus.on_reconnect(reconnected.set)
    server.kill()
    await until(lambda: not bus.connected, "the connection to be seen lost")
    began = time.monotonic()
    for _ in range(1000):
        assert not await bus.publish("s", b"lost")
    with pytest.raises(TimeoutError):
        await bus.request("s", b"?", 5)
    assert time.monotonic() - began < 1
    assert bus.refused == 1000
    server.start()
    await asyncio.wait_for(reconnected.wait(), 10)
    assert bus.reconnects == 1
    assert await bus.publish("s", b"found")
    await until(lambda: heard == [b"found"], "a message over the subscription made before")
    await bus.close()


async def test_a_bus_may_be_there_before_its_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    bus = await NatsBus.connect(server.url, wait_s=0.05)
    assert not bus.connected
    heard: list[bytes] = []
    await bus.subscribe("s", lambda m: heard.append(m.data))
    server.start()
    await until(lambda: bus.connected, "the connection", 10)

    async def told() -> None:
        while not heard:
            await bus.publish("s", b"x")
            await asyncio.sleep(0.01)

    await asyncio.wait_for(told(), 5)
    await bus.close()
    server.kill()


async def test_closing_without_a_server_ends_at_once(tmp_path: Path) -> None:
    bus = await NatsBus.connect(NatsServer(tmp_path).url, wait_s=0.01)
    await asyncio.wait_for(bus.close(), 2)


async def test_a_burst_beyond_the_clients_buffer_arrives_whole(server: NatsServer) -> None:
    sender, receiver = await NatsBus.connect(server.url), await NatsBus.connect(server.url)
    heard: list[int] = []
    await receiver.subscribe("s", lambda m: heard.append(len(m.data)))
    sent = [await sender.publish("s", bytes(500_000)) for _ in range(60)]
    assert all(sent)
    await until(lambda: len(heard) == 60, "every message of the burst", 10)
    assert sender.refused == 0
    await sender.close()
    await receiver.close()
