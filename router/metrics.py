"""The router's metrics: `warmroute_router_*`.

Labels are bounded: models and workers that discovery knows, fixed kinds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from serving.metrics import LATENCY_BUCKETS, MICRO_BUCKETS, RATIO_BUCKETS

if TYPE_CHECKING:
    from router.placement import Decision


class RouterMetrics:
    """Counters and histograms of requests and decisions, in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "warmroute_router_requests", "Requests answered by a worker", ["model", "code"], registry=registry
        )
        self._decisions = Counter(
            "warmroute_router_decisions", "Placements by kind of reason", ["model", "policy", "kind"],
            registry=registry,
        )  # fmt: skip
        self._stages = Histogram(
            "warmroute_router_decision_seconds", "Time to a decision by stage", ["stage"],
            buckets=MICRO_BUCKETS, registry=registry,
        )  # fmt: skip
        self._stage = {name: self._stages.labels(name) for name in ("tokenize", "decide")}
        self._first_byte = Histogram(
            "warmroute_router_time_to_first_byte_seconds", "From the request to the answer's first byte",
            ["model"], buckets=LATENCY_BUCKETS, registry=registry,
        )  # fmt: skip
        self._hit_ratio = Histogram(
            "warmroute_router_promised_hit_ratio", "Overlap of the chosen worker over the prompt, in blocks",
            ["model"], buckets=RATIO_BUCKETS, registry=registry,
        )  # fmt: skip
        self._prompt_tokens = Counter(
            "warmroute_router_prompt_tokens", "Prompt tokens placed", ["model"], registry=registry
        )
        self._cached = Counter(
            "warmroute_router_cached_tokens",
            "Cached prompt tokens: available = the best any worker holds, promised = the chosen one holds,"
            " delivered = the engine's own usage",
            ["model", "stage"], registry=registry,
        )  # fmt: skip
        self.retries = Counter(
            "warmroute_router_retries",
            "Attempts that failed before the first byte",
            ["kind"],
            registry=registry,
        )
        self.upstream_errors = Counter(
            "warmroute_router_upstream_errors", "Answers that broke off", ["kind"], registry=registry
        )

        self._unexpected = Counter(
            "warmroute_router_unexpected_errors", "Exceptions that no handler expected", ["route"], registry=registry
        )

    def unexpected_error(self, route: str) -> None:
        """Count an exception that became a 500."""
        self._unexpected.labels(route).inc()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times one stage of a decision."""
        start = perf_counter()
        try:
            yield
        finally:
            self._stage[name].observe(perf_counter() - start)

    def answered(self, decision: "Decision", status: int, seconds: float) -> None:
        """An answer began: count it, its decision, its promised hit and its first byte."""
        model = decision.target.view.beat.model
        size = decision.prompt.block_size
        self._requests.labels(model, str(status)).inc()
        self._decisions.labels(model, decision.policy, decision.choice.kind).inc()
        self._first_byte.labels(model).observe(seconds)
        self._prompt_tokens.labels(model).inc(decision.prompt.tokens)
        self._cached.labels(model, "available").inc(decision.best_overlap * size)
        self._cached.labels(model, "promised").inc(decision.candidate.overlap_blocks * size)
        if decision.prompt.blocks:
            self._hit_ratio.labels(model).observe(decision.candidate.overlap_blocks / decision.prompt.blocks)

    def delivered(self, decision: "Decision", cached_tokens: int | None) -> None:
        """An answer ended: count what the engine says it took from its cache."""
        if cached_tokens is not None:
            self._cached.labels(decision.target.view.beat.model, "delivered").inc(cached_tokens)
