"""Publisher, plane and consumer together, over the in-process bus and over a real server that dies and returns."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from kvevents import control
from kvevents.bus import Bus, Incoming, MemoryBus, NatsBus
from kvevents.consumer import EventConsumer, WorkerView
from kvevents.publisher import EventPublisher
from kvevents.source import State, Trust
from kvevents.subjects import beat_subject, control_subject, events_subject
from kvevents.types import PROTOCOL_VERSION, SourceId, decode_beat, encode_beat
from kvevents.worker_plane import WorkerPlane

from .support import BLOCK, MODEL, Engine, NatsServer, SetSink, beat_of, new_engine, until


class LossyBus(MemoryBus):
    """Loses the messages that `lost` chooses."""

    lost: Callable[[str], bool] = staticmethod(lambda subject: False)

    async def publish(self, subject: str, data: bytes) -> bool:
        return True if self.lost(subject) else await super().publish(subject, data)


class Stack:
    """Workers and one consumer."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.engines: list[Engine] = []
        self.planes: list[WorkerPlane] = []
        self.sink = SetSink()
        self.told: list[WorkerView] = []
        self.consumer: EventConsumer

    async def follow(self, bus: Bus, **options: float) -> None:
        self.consumer = EventConsumer(
            bus,
            self.sink,
            clock=time.monotonic,
            rng=random.Random(1),
            on_change=self.told.append,
            **options,  # type: ignore[arg-type]
        )
        await self.consumer.start()
        self._stack.push_async_callback(self.consumer.stop)

    async def work(self, bus: Bus, name: str, *, ranks: int = 1, interval_s: float = 0.2, **options: int) -> Engine:
        """Start a worker; return the engine of its first rank."""
        engines = [
            Engine(EventPublisher(SourceId(name, rank), MODEL, BLOCK, **options), rank)  # type: ignore[arg-type]
            for rank in range(ranks)
        ]
        publishers = [engine.publisher for engine in engines]
        plane = WorkerPlane(bus, publishers, lambda: beat_of(*publishers), interval_s=interval_s)
        await plane.start()
        self._stack.push_async_callback(plane.stop)
        self.engines += engines
        self.planes.append(plane)
        return engines[0]

    def held(self, engine: Engine) -> set[int]:
        """What the sink holds of an engine."""
        source = self.consumer.sources().get(engine.publisher.source)
        return set() if source is None else self.sink.sets[source.handle]

    def exact(self) -> bool:
        sources = self.consumer.sources()
        return all(
            (source := sources.get(engine.publisher.source)) is not None
            and source.trust is Trust.EXACT
            and source.seq == engine.publisher.state().seq
            and self.held(engine) == engine.truth()
            for engine in self.engines
        )

    async def quiet(self, timeout_s: float = 2.0) -> None:
        """Once quiet, every view equals its cache within two seconds."""
        await until(self.exact, "views equal caches", timeout_s)
        self.consumer.check_integrity()
        assert self.consumer.internal_errors == 0


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with AsyncExitStack() as exits:
        yield Stack(exits)


async def connect(stack: Stack, server: NatsServer) -> NatsBus:
    bus = await NatsBus.connect(server.url)
    stack._stack.push_async_callback(bus.close)
    return bus


async def test_workers_are_found_and_their_views_equal_their_caches(stack: Stack, server: NatsServer) -> None:
    await stack.follow(await connect(stack, server))
    for name in ("w.1", "worker *>"):
        await stack.work(await connect(stack, server), name, ranks=2)
    for _ in range(20):
        for engine in stack.engines:
            engine.churn(3)
        await asyncio.sleep(0)
    await stack.consumer.settled(5, workers=2)
    await stack.quiet()
    assert sum(source.gaps for source in stack.consumer.sources().values()) == 0


async def test_a_consumer_that_comes_late_takes_snapshots_in_parts_below_max_payload(
    stack: Stack, server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = NatsServer(tmp_path_factory.mktemp("small"), max_payload=8 * 1024)
    small.start()
    stack._stack.callback(small.kill)
    engine = await stack.work(await connect(stack, small), "w")
    engine.store(3000)
    engine.publisher.end_step()
    await stack.follow(await connect(stack, small))
    await stack.quiet()
    assert stack.consumer.sources()[SourceId("w", 0)].counters.snapshots == 1
    assert stack.planes[0].lost == 0


async def test_a_killed_and_restarted_server_costs_no_exactness(stack: Stack, server: NatsServer) -> None:
    buses = [await connect(stack, server) for _ in range(2)]
    await stack.follow(buses[0])
    engine = await stack.work(buses[1], "w")
    engine.churn(20)
    await stack.quiet()
    held = set(stack.held(engine))
    server.kill()
    await until(lambda: not any(bus.connected for bus in buses), "both to see the outage")
    before = stack.planes[0].lost
    engine.churn(30)
    await until(lambda: stack.planes[0].lost > before, "messages lost")
    assert stack.held(engine) == held
    server.start()
    await until(lambda: all(bus.connected for bus in buses), "both to reconnect", 10)
    await stack.quiet()
    source = stack.consumer.sources()[SourceId("w", 0)]
    assert source.repairs >= 1


async def test_a_lost_message_is_found_by_the_next_and_repaired_while_the_overlap_never_dips(stack: Stack) -> None:
    bus = LossyBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w")
    kept = set(engine.store(10))
    engine.publisher.end_step()
    await stack.quiet()
    resident = set(stack.held(engine))
    source = stack.consumer.sources()[SourceId("w", 0)]
    repairs, snapshots = source.repairs, source.counters.snapshots
    bus.lost = lambda subject: subject.startswith("kv.v1.events")
    engine.store(3, next(iter(kept)))
    engine.publisher.end_step()
    await until(lambda: stack.planes[0].sent == 2, "the loss")
    bus.lost = lambda subject: False
    engine.store(3)
    engine.publisher.end_step()
    trusts = set()
    for _ in range(1000):
        trusts.add(source.trust)
        assert resident <= stack.held(engine)
        if stack.exact():
            break
        await asyncio.sleep(0.001)
    assert Trust.DEGRADED in trusts
    assert (source.gaps, source.repairs, source.counters.snapshots) == (1, repairs + 1, snapshots)


async def test_a_lost_last_message_is_found_by_a_heartbeat(stack: Stack) -> None:
    bus = LossyBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w")
    engine.churn(3)
    await stack.quiet()
    bus.lost = lambda subject: subject.startswith("kv.v1.events")
    engine.churn(1)
    await until(lambda: stack.planes[0].sent == 4, "the loss")
    bus.lost = lambda subject: False
    await stack.quiet()
    assert stack.consumer.sources()[SourceId("w", 0)].gaps == 1


async def test_an_overflow_of_the_queue_is_repaired(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w", queue_messages=4, ring_messages=8)
    engine.churn(1)
    await stack.quiet()
    source = stack.consumer.sources()[SourceId("w", 0)]
    snapshots = source.counters.snapshots
    engine.churn(100)
    assert engine.publisher.dropped > 0
    await stack.quiet()
    assert source.counters.snapshots == snapshots + 1


async def test_a_restarted_worker_replaces_its_old_view(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w")
    engine.churn(5)
    await stack.quiet()
    dead = stack.planes[0]
    for task in dead._tasks:  # as by kill -9: no goodbye
        task.cancel()
    stack.engines.clear()
    reborn = new_engine("w")
    stack.engines.append(reborn)
    reborn.churn(4)
    plane = WorkerPlane(bus, [reborn.publisher], lambda: beat_of(reborn.publisher), interval_s=0.2)
    await plane.start()
    stack._stack.push_async_callback(plane.stop)
    await stack.quiet()
    assert stack.consumer.sources()[SourceId("w", 0)].counters.restarts == 1


async def test_a_goodbye_removes_a_worker_and_a_late_one_of_an_old_incarnation_does_not(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w")
    engine.churn(2)
    await stack.quiet()
    old = new_engine("w", epoch=5)
    await bus.publish(beat_subject("w"), encode_beat(beat_of(old.publisher, state="stopped")))
    assert stack.consumer.rejected["late_beat"] == 1
    await stack.quiet()
    await stack.planes[0].stop()
    assert stack.consumer.workers() == {}
    assert stack.sink.sets == {}
    assert not stack.told[-1].alive


async def test_silence_takes_a_worker_out_and_then_its_entries(stack: Stack) -> None:
    bus = LossyBus()
    await stack.follow(bus, lease_s=0.2, grace_s=0.8)
    engine = await stack.work(bus, "w", interval_s=0.05)
    engine.churn(2)
    await stack.quiet()
    view = stack.consumer.workers()["w"]
    assert view.ready
    bus.lost = lambda subject: True
    await until(lambda: view.silent, "the lease to end")
    assert not view.ready
    assert stack.held(engine) == engine.truth()
    await until(lambda: stack.consumer.workers() == {}, "the grace to end")
    assert stack.sink.sets == {}
    bus.lost = lambda subject: False
    await stack.quiet()
    assert stack.consumer.workers()["w"].ready


async def test_a_cold_start_over_many_workers_repairs_few_at_a_time(stack: Stack) -> None:
    bus = MemoryBus()
    asking, most = set(), 0

    class Counting(MemoryBus):
        async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
            nonlocal most
            asking.add(subject)
            most = max(most, len(asking))
            try:
                return await super().request(subject, data, timeout_s)
            finally:
                asking.discard(subject)

    bus = Counting()
    for i in range(64):
        (await stack.work(bus, f"w{i}")).churn(3)
    await stack.follow(bus)
    await stack.quiet()
    assert 1 < most <= 8


async def test_another_block_size_or_model_opens_another_set(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w")
    engine.churn(2)
    await stack.quiet()
    first = stack.consumer.sources()[SourceId("w", 0)]
    other = beat_of(EventPublisher(SourceId("w", 0), "another model", 8))
    await bus.publish(beat_subject("w"), encode_beat(other))
    second = stack.consumer.sources()[SourceId("w", 0)]
    assert (first.state, second.model, second.block_size) == (State.GONE, "another model", 8)
    assert set(stack.sink.sets) == {second.handle}
    await bus.publish(events_subject(MODEL, SourceId("w", 0)), b"")
    assert stack.consumer.rejected["malformed"] == 1


async def test_a_rank_that_is_no_longer_told_leaves(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    publishers = [EventPublisher(SourceId("w", rank), MODEL, BLOCK) for rank in range(2)]
    await bus.publish(beat_subject("w"), encode_beat(beat_of(*publishers)))
    assert set(stack.consumer.sources()) == {SourceId("w", 0), SourceId("w", 1)}
    await bus.publish(beat_subject("w"), encode_beat(beat_of(publishers[1])))
    assert set(stack.consumer.sources()) == {SourceId("w", 1)}


async def test_a_failing_callback_or_heartbeat_is_counted_and_ends_nothing(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    failing = True

    def fail(view: WorkerView) -> None:
        if failing:
            raise RuntimeError("the router's own fault")

    stack.consumer._on_change = fail
    publisher = EventPublisher(SourceId("w", 0), MODEL, BLOCK)
    calls = 0

    def beat() -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the worker's own fault")
        return beat_of(publisher)

    plane = WorkerPlane(bus, [publisher], beat, interval_s=0.02)  # type: ignore[arg-type]
    await plane.start()
    await until(lambda: stack.consumer.internal_errors > 1 and plane.internal_errors == 1 and calls > 3, "failures")
    failing = False
    await stack.consumer.settled(2)
    await plane.stop()


async def test_what_is_asked_wrongly_is_refused_by_name(stack: Stack) -> None:
    bus = MemoryBus()
    engine = await stack.work(bus, "w")
    engine.churn(2)
    subject = control_subject(engine.publisher.source)

    async def ask(request: control.Request | bytes) -> control.Reply:
        data = request if isinstance(request, bytes) else control.encode(request)
        return control.decode_reply(await bus.request(subject, data, 1))

    assert isinstance(await ask(b"?"), control.Refused)
    assert isinstance(await ask(control.EventsSince(2, 1, 1)), control.Refused)
    assert isinstance(await ask(control.EventsSince(PROTOCOL_VERSION, 1, 1)), control.TooOld)
    for request in (
        control.SnapshotChunk(PROTOCOL_VERSION, "none", 0),
        control.SnapshotChunk(PROTOCOL_VERSION, "none", -1),
    ):
        reply = await ask(request)
        assert isinstance(reply, control.Refused)
        assert reply.reason == "gone"
    part = await ask(control.SnapshotChunk(PROTOCOL_VERSION, "", 0))
    assert isinstance(part, control.SnapshotPart)
    reply = await ask(control.SnapshotChunk(PROTOCOL_VERSION, part.snapshot, 9))
    assert isinstance(reply, control.Refused)
    await bus.publish(subject, b"no reply subject")
    assert stack.planes[0].rejected_requests == 3


async def test_stopping_sends_what_waits_and_says_goodbye_last() -> None:
    bus = MemoryBus()
    heard: list[Incoming] = []
    await bus.subscribe("kv.v1.>", heard.append)
    engine = new_engine()
    plane = WorkerPlane(bus, [engine.publisher], lambda: beat_of(engine.publisher), interval_s=60)
    await plane.start()
    engine.churn(3)
    await plane.stop()
    assert decode_beat(heard[-1].data).state == "stopped"
    assert sum(incoming.subject.startswith("kv.v1.events") for incoming in heard) == 3


async def test_no_bytes_on_any_subject_raise_out_of_the_consumer(stack: Stack) -> None:
    bus = MemoryBus()
    await stack.follow(bus)
    engine = await stack.work(bus, "w", interval_s=0.05)
    engine.churn(3)
    await stack.quiet()
    samples: list[tuple[str, bytes]] = []
    await bus.subscribe("kv.v1.>", lambda incoming: samples.append((incoming.subject, incoming.data)))
    engine.churn(5)
    await until(lambda: len(samples) > 8, "some samples")
    rng = random.Random(7)
    for _ in range(4000):
        subject, data = rng.choice(samples[:9])
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        await bus.publish(subject, bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed) + 1)])]))
    assert stack.consumer.internal_errors == 0
    assert sum(stack.consumer.rejected.values()) > 1000
    stack.consumer.check_integrity()
