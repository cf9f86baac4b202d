"""The worker's metrics: the names that inference gateways scrape (`vllm:`), and our own (`warmroute_worker_`)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS
from worker.engine import Engine


class RequestMetrics:
    """What is seen at the HTTP side, in the given registry; one model name a worker."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token", LATENCY_BUCKETS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer", LATENCY_BUCKETS
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "From the request to the end of its answer", LATENCY_BUCKETS
        )
        self.queued = histogram("vllm:request_queue_time_seconds", "From the request to its admission", LATENCY_BUCKETS)
        self.prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.generated_tokens = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request", TOKEN_BUCKETS
        )
        self._requests = Counter(
            "warmroute_worker_http_requests", "Generation requests by route and status", ["route", "code"],
            registry=registry,
        )  # fmt: skip
        self._unexpected = Counter(
            "warmroute_worker_unexpected_errors", "Exceptions that no handler expected", ["route"], registry=registry
        )
        self.disconnects = Counter(
            "warmroute_worker_client_disconnects", "Clients that left before their answer ended", registry=registry
        )

    def answered(self, route: str, status: int) -> None:
        """An answer, or the refusal of one, left."""
        self._requests.labels(route, str(status)).inc()

    def unexpected(self, route: str) -> None:
        """A handler failed."""
        self._unexpected.labels(route).inc()


class EngineCollector(Collector):
    """Reads the engine's snapshot and counters at the time of the scrape."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        engine, load, context = self._engine, self._engine.load, self._engine.core.context
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch", load.running),
            ("vllm:num_requests_waiting", "Requests that wait for admission", engine.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1", load.usage),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Always 1", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self._model, str(context.block_size_tokens), str(load.total_blocks)], 1)
        yield info
        blocks = GaugeMetricFamily("warmroute_worker_blocks", "KV blocks by what holds them", labels=["state"])
        free = load.total_blocks - load.used_blocks - load.cached_blocks
        for state, number in (("held", load.used_blocks), ("cached", load.cached_blocks), ("free", free)):
            blocks.add_metric([state], number)
        yield blocks
        yield GaugeMetricFamily(
            "warmroute_worker_waiting_prompt_tokens", "Prompt tokens not computed yet", load.waiting_prompt_tokens
        )
        yield GaugeMetricFamily("warmroute_worker_engine_up", "1 while the engine's thread runs", engine.is_alive)

    def _counters(self) -> Iterator[Metric]:
        counters = self._engine.core.counters
        for name, text, number in (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests", counters.prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens", counters.generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", counters.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens taken from the prefix cache", counters.cached_tokens),
            ("vllm:num_preemptions", "Requests that lost their blocks and began again", counters.preemptions),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], number)
            yield family
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, number in counters.finished.items():
            ended.add_metric([self._model, reason], number)
        yield ended
        for name, text, amount in (
            ("steps", "Engine steps", counters.steps),
            ("step_seconds", "Time in engine steps", counters.step_seconds),
            ("forward_seconds", "Time in forward passes", counters.forward_seconds),
            ("sample_seconds", "Time in sampling", counters.sample_seconds),
            ("computed_tokens", "Tokens that went through a forward pass", counters.computed_tokens),
            ("step_failures", "Steps whose forward or sampling failed", counters.step_failures),
            ("engine_resets", "Times the whole cache was given up after an error", counters.resets),
            ("integrity_failures", "Integrity checks that failed", counters.integrity_failures),
            ("undelivered_outputs", "Outputs that found no event loop", self._engine.undelivered),
        ):
            yield CounterMetricFamily(f"warmroute_worker_{name}", text, amount)
