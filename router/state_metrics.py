"""Gauges read from the router's state at the moment of a scrape: index, workers, promises, tokenising."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.service import Router


class StateCollector(Collector):
    """Series exist only for workers and models that are known now, so that they leave with them."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield from self._index()
        yield from self._workers()
        yield from self._process()

    def _index(self) -> Iterable[Metric]:
        blocks = GaugeMetricFamily(
            "warmroute_router_index_blocks", "Blocks over all sources", labels=["model", "block_size"]
        )
        memory = GaugeMetricFamily(
            "warmroute_router_index_bytes", "Bytes of the tables", labels=["model", "block_size"]
        )
        for key, index in self._router.catalog.indexes().items():
            labels = [key.model, str(key.block_size)]
            blocks.add_metric(labels, index.worker_blocks)
            memory.add_metric(labels, index.nbytes)
        yield blocks
        yield memory

    def _workers(self) -> Iterable[Metric]:
        takes = GaugeMetricFamily("warmroute_router_worker_ready", "1 when the worker takes prompts", labels=["worker"])
        requests = GaugeMetricFamily(
            "warmroute_router_worker_requests", "Requests in flight", labels=["worker", "dp_rank"]
        )
        prefill = GaugeMetricFamily(
            "warmroute_router_worker_prefill_tokens",
            "Prefill promised and not done",
            labels=["worker", "dp_rank"],
        )
        fleet = self._router.fleet
        views = list(fleet.workers().values())
        for view in views:
            takes.add_metric([view.beat.worker], float(fleet.why_not(view) is None))
        for target in fleet.targets(views):
            account = self._router.ledger.account(target.key)
            labels = [target.key.worker, str(target.dp_rank)]
            requests.add_metric(labels, account.running)
            prefill.add_metric(labels, account.queued_tokens)
        yield takes
        yield requests
        yield prefill

    def _process(self) -> Iterable[Metric]:
        in_flight = self._router.in_flight
        yield GaugeMetricFamily("warmroute_router_in_flight_requests", "Requests in the router", value=in_flight.count)
        yield CounterMetricFamily(
            "warmroute_router_client_disconnects",
            "Clients that left before the end",
            value=in_flight.cancelled,
        )
        reader = self._router.reader
        tokenised = CounterMetricFamily(
            "warmroute_router_tokenised", "Prompts by where their token ids came from", labels=["source"]
        )
        for source, count in reader.counts.items():
            tokenised.add_metric([source], count)
        yield tokenised
        unhashed = CounterMetricFamily(
            "warmroute_router_unhashed", "Prompts routed by load alone, by reason", labels=["reason"]
        )
        for reason, count in reader.failures.items():
            unhashed.add_metric([reason], count)
        yield unhashed
        yield CounterMetricFamily(
            "warmroute_router_index_late_writes",
            "Events for sources that had left",
            value=self._router.catalog.late_writes,
        )
        yield GaugeMetricFamily(
            "warmroute_router_bus_connected",
            "1 while the bus is connected",
            value=float(self._router.bus.connected),
        )
        yield GaugeMetricFamily(
            "warmroute_router_draining", "1 while shutting down", value=float(self._router.draining)
        )
