"""What a scrape shows is what has happened."""

import random
import time

from prometheus_client import CollectorRegistry, generate_latest

from kvevents.bus import MemoryBus
from kvevents.consumer import EventConsumer
from kvevents.metrics import ConsumerCollector, PublisherCollector
from kvevents.subjects import beat_subject, events_subject
from kvevents.types import SourceId, encode_beat
from kvevents.worker_plane import WorkerPlane

from .support import MODEL, SetSink, beat_of, new_engine


def scraped(collector: ConsumerCollector | PublisherCollector) -> dict[str, float]:
    """`name{labels}` -> value."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_a_routers_scrape_tells_what_became_of_every_message() -> None:
    bus = MemoryBus()
    consumer = EventConsumer(bus, SetSink(), clock=time.monotonic, rng=random.Random(1))
    await consumer.start()
    publisher = (engine := new_engine()).publisher
    await bus.publish(beat_subject("w.1"), encode_beat(beat_of(publisher)))
    blocks = engine.store(3)
    engine.remove(blocks[2:])
    publisher.end_step()
    data = publisher.take() or b""
    subject = events_subject(MODEL, SourceId("w.1", 0))
    for payload in (data, data, b"junk"):
        await bus.publish(subject, payload)
    figures = scraped(ConsumerCollector(consumer))
    await consumer.stop()
    source = '{dp_rank="0",worker="w.1"}'
    assert figures[f"warmroute_kv_messages_applied_total{source}"] == 1
    assert figures[f"warmroute_kv_blocks_stored_total{source}"] == 3
    assert figures[f"warmroute_kv_blocks_removed_total{source}"] == 1
    assert figures[f"warmroute_kv_source_blocks{source}"] == 2
    assert figures['warmroute_kv_source_rejected_total{dp_rank="0",reason="duplicate",worker="w.1"}'] == 1
    assert figures['warmroute_kv_rejected_total{reason="malformed"}'] == 1
    assert figures['warmroute_kv_source_state{dp_rank="0",state="suspect",worker="w.1"}'] == 1
    assert figures['warmroute_kv_source_state{dp_rank="0",state="live",worker="w.1"}'] == 0
    assert figures['warmroute_kv_source_trust{dp_rank="0",trust="degraded",worker="w.1"}'] == 1
    assert figures["warmroute_kv_messages_received_total"] == 3
    assert figures["warmroute_kv_beats_received_total"] == 1


async def test_a_workers_scrape_tells_what_was_sent_dropped_and_refused() -> None:
    engine = new_engine(queue_messages=2)
    plane = WorkerPlane(MemoryBus(), [engine.publisher], lambda: beat_of(engine.publisher))
    engine.churn(5)
    try:
        engine.publisher.listener("moved", {})
    except ValueError:
        figures = scraped(PublisherCollector([engine.publisher], plane))
    assert figures['warmroute_kv_publisher_messages_total{dp_rank="0"}'] == 5
    assert figures['warmroute_kv_publisher_dropped_total{dp_rank="0"}'] == 3
    assert figures['warmroute_kv_publisher_queue{dp_rank="0"}'] == 2
    assert figures['warmroute_kv_publisher_blocks{dp_rank="0"}'] == len(engine.parent)
    assert figures['warmroute_kv_publisher_rejected_total{dp_rank="0",reason="kind"}'] == 1
    assert figures["warmroute_kv_plane_sent_total"] == 0
