"""What every process shares for its Prometheus metrics: registry, bucket lists, the /metrics handler."""

import platform
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
"""Seconds, for whole requests and times to first token."""
MICRO_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)
"""Seconds, for work inside the process."""
TOKEN_BUCKETS = tuple(float(2**exponent) for exponent in range(18))
RATIO_BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (`process_*`, `python_gc_*`) and `warmroute_build_info`.

    One a process object, never the library's global one: tests and `up` hold several processes' objects at once.
    """
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    info = Gauge("warmroute_build_info", "Always 1; what runs here", ["version", "python"], registry=registry)
    info.labels(installed_version(), platform.python_version()).set(1)
    return registry


def installed_version() -> str:
    """The installed version of warmroute; "unknown" when it runs from a folder that was never installed."""
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "unknown"


def exposition_handler(registry: CollectorRegistry) -> Handler:
    """A GET /metrics handler: the text format, or OpenMetrics when the scraper accepts it."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics
