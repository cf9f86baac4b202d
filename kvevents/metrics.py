"""Prometheus collectors of the event plane, read from plain counters at the moment of a scrape: `warmroute_kv_*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvevents.consumer import EventConsumer
from kvevents.publisher import EventPublisher
from kvevents.source import Source, State, Trust
from kvevents.worker_plane import WorkerPlane

_SOURCE = ["worker", "dp_rank"]


class ConsumerCollector(Collector):
    """What a router knows of its sources.  A source's series leave with it."""

    _COUNTERS: tuple[tuple[str, str, Callable[[Source], int]], ...] = (
        ("warmroute_kv_messages_applied", "Messages applied to a view", lambda s: s.counters.applied),
        ("warmroute_kv_blocks_stored", "Blocks added to the index by events", lambda s: s.counters.blocks_stored),
        ("warmroute_kv_blocks_removed", "Blocks removed from the index by events", lambda s: s.counters.blocks_removed),
        ("warmroute_kv_gaps", "Holes in seq that did not close by themselves", lambda s: s.counters.gaps),
        ("warmroute_kv_repairs", "Repairs that brought a view into step", lambda s: s.counters.repairs),
        ("warmroute_kv_snapshots", "Repairs that took the whole set", lambda s: s.counters.snapshots),
        ("warmroute_kv_restarts", "New incarnations seen", lambda s: s.counters.restarts),
    )
    _GAUGES: tuple[tuple[str, str, Callable[[Source], int]], ...] = (
        ("warmroute_kv_source_blocks", "Members of the view, over all tiers", lambda s: s.blocks),
        ("warmroute_kv_source_seq", "Seq of the last message in the view", lambda s: s.seq),
        ("warmroute_kv_source_lag_messages", "Messages known to be sent and not in the view", lambda s: s.lag),
    )

    def __init__(self, consumer: EventConsumer) -> None:
        self._consumer = consumer

    def collect(self) -> Iterable[Metric]:
        """All families."""
        sources = list(self._consumer.sources().values())
        for name, text, read in self._COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_SOURCE)
            for source in sources:
                counter.add_metric(_labels(source), read(source))
            yield counter
        for name, text, read in self._GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_SOURCE)
            for source in sources:
                gauge.add_metric(_labels(source), read(source))
            yield gauge
        yield from _one_hot("warmroute_kv_source_state", "1 for the state of a source", "state", State, sources)
        yield from _one_hot("warmroute_kv_source_trust", "1 for the trust in a source", "trust", Trust, sources)
        yield from self._plane(sources)

    def _plane(self, sources: list[Source]) -> Iterable[Metric]:
        consumer = self._consumer
        rejected = CounterMetricFamily(
            "warmroute_kv_source_rejected", "Messages of a source not applied", labels=[*_SOURCE, "reason"]
        )
        for source in sources:
            for reason, count in sorted(source.counters.rejected.items()):
                rejected.add_metric([*_labels(source), reason], count)
        yield rejected
        yield _by_reason("warmroute_kv_rejected", "Bytes from the bus that were not used", consumer.rejected)
        yield _by_reason("warmroute_kv_repair_failures", "Attempts at a repair that failed", consumer.repair_failures)
        for name, text, count in (
            ("warmroute_kv_messages_received", "Messages on the event subjects", consumer.messages),
            ("warmroute_kv_beats_received", "Heartbeats", consumer.beats),
            ("warmroute_kv_consumer_errors", "Failures of our own in the consumer", consumer.internal_errors),
        ):
            yield CounterMetricFamily(name, text, value=count)


class PublisherCollector(Collector):
    """What a worker has sent, dropped and holds."""

    def __init__(self, publishers: list[EventPublisher], plane: WorkerPlane | None = None) -> None:
        self._publishers, self._plane = publishers, plane

    def collect(self) -> Iterable[Metric]:
        """All families."""
        closed = CounterMetricFamily("warmroute_kv_publisher_messages", "Messages closed", labels=["dp_rank"])
        dropped = CounterMetricFamily(
            "warmroute_kv_publisher_dropped", "Messages dropped at a full queue; consumers repair", labels=["dp_rank"]
        )
        rejected = CounterMetricFamily(
            "warmroute_kv_publisher_rejected", "Engine events that could not be announced", labels=["dp_rank", "reason"]
        )
        queued = GaugeMetricFamily("warmroute_kv_publisher_queue", "Messages that wait for the bus", labels=["dp_rank"])
        blocks = GaugeMetricFamily("warmroute_kv_publisher_blocks", "Members of the set", labels=["dp_rank"])
        for publisher in self._publishers:
            rank = str(publisher.source.dp_rank)
            closed.add_metric([rank], publisher.messages)
            dropped.add_metric([rank], publisher.dropped)
            queued.add_metric([rank], publisher.queued)
            blocks.add_metric([rank], publisher.blocks)
            for reason, count in sorted(publisher.rejected.items()):
                rejected.add_metric([rank, reason], count)
        yield from (closed, dropped, rejected, queued, blocks)
        if self._plane is not None:
            plane = self._plane
            for name, text, count in (
                ("warmroute_kv_plane_sent", "Messages handed to the bus", plane.sent),
                ("warmroute_kv_plane_lost", "Messages the bus would not take; consumers repair", plane.lost),
                ("warmroute_kv_plane_beats", "Heartbeats handed to the bus", plane.beats),
                ("warmroute_kv_plane_rejected_requests", "Control requests refused", plane.rejected_requests),
                ("warmroute_kv_plane_errors", "Failures of our own in the plane", plane.internal_errors),
            ):
                yield CounterMetricFamily(name, text, value=count)


def _labels(source: Source) -> list[str]:
    return [source.id.worker, str(source.id.dp_rank)]


def _one_hot(
    name: str, text: str, label: str, values: type[State] | type[Trust], sources: list[Source]
) -> Iterable[Metric]:
    family = GaugeMetricFamily(name, text, labels=[*_SOURCE, label])
    for source in sources:
        for value in values:
            family.add_metric([*_labels(source), value], float(getattr(source, label) is value))
    yield family


def _by_reason(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["reason"])
    for reason, count in sorted(counts.items()):
        family.add_metric([reason], count)
    return family
