"""The shared registry and the /metrics handler."""

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from serving import metrics


async def scrape(accept: str = "") -> tuple[str, str]:
    """(content type, body) of a /metrics of a registry with one counter at 2."""
    registry = metrics.new_registry()
    Counter("things", "Things", registry=registry).inc(2)
    app = web.Application()
    app.router.add_get("/metrics", metrics.exposition_handler(registry))
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/metrics", headers={"Accept": accept} if accept else {})
        return response.headers["Content-Type"], await response.text()


async def test_metrics_are_text_that_prometheus_reads() -> None:
    content_type, body = await scrape()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert content_type.startswith("text/plain")
    assert families["things"].samples[0].value == 2
    assert families["warmroute_build_info"].samples[0].labels["version"] == metrics.installed_version()
    assert "process_resident_memory_bytes" in families


async def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    content_type, body = await scrape("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_two_registries_do_not_share_series() -> None:
    first, second = metrics.new_registry(), metrics.new_registry()
    Counter("only_here", "x", registry=first)
    assert second.get_sample_value("only_here_total") is None


def test_buckets_grow() -> None:
    for buckets in (metrics.LATENCY_BUCKETS, metrics.MICRO_BUCKETS, metrics.TOKEN_BUCKETS, metrics.RATIO_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
