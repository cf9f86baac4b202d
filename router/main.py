"""Starts one router process: bus, discovery, index, HTTP; runs until a signal, then drains."""

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from kvevents.bus import NatsBus
from kvevents.consumer import EventConsumer
from kvevents.metrics import ConsumerCollector
from router.breaker import Breakers
from router.config import RouterConfig
from router.fleet import Fleet
from router.http.app import build
from router.in_flight import InFlight
from router.index.catalog import IndexCatalog
from router.index.table import compile_all
from router.load import LoadLedger
from router.metrics import RouterMetrics
from router.placement import Placer
from router.policy.registry import policy_by_name
from router.predicted import PredictedPrefixes
from router.receipts import Receipts
from router.service import Router
from router.state_metrics import StateCollector
from router.tokenize import PromptReader
from serving import http as serving_http
from serving import logs
from serving.metrics import new_registry

log = logs.get_logger(__name__)

_UPKEEP_EVERY_S = 0.02
_TIDY_EVERY_S = 1.0
_BUS_WAIT_S = 1.0
"""A router whose bus is away listens all the same after this time, and says on /ready what is missing."""


@dataclass(slots=True, frozen=True)
class Running:
    """A router that listens."""

    router: Router
    address: str


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[Running]:
    """A router from start to end, in the caller's event loop; leaving the block stops it at once (`drain`
    first to be gentle).
    """
    async with AsyncExitStack() as stack:
        router = await _assemble(config, stack)
        runner, port = await serving_http.start_server(build(router), config.host, config.port)
        stack.push_async_callback(runner.cleanup)
        housekeeping = asyncio.create_task(_housekeeping(router))
        stack.push_async_callback(_cancelled, housekeeping)
        yield Running(router, f"http://{config.host}:{port}")


async def drain(router: Router) -> None:
    """Take no new traffic (/ready says so) and wait until running requests have ended, `drain_s` at most."""
    router.draining = True
    if not await router.in_flight.wait_idle(router.config.drain_s):
        log.warning("router.drain_timeout", in_flight=router.in_flight.count)


def run(config: RouterConfig) -> int:
    """Run until SIGINT or SIGTERM; prints one JSON line on standard output when ready.

    Returns the exit status.
    """
    logs.setup(config.log_level, json=config.log_json)
    with suppress(ImportError):
        import uvloop

        uvloop.install()
    return asyncio.run(_run(config))


async def _run(config: RouterConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as started:
        ready = {"event": "ready", "component": "router", "id": "router", "address": started.address}
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()
        await drain(started.router)
    return 0


async def _assemble(config: RouterConfig, stack: AsyncExitStack) -> Router:
    """Build every part in the order of dependence; `stack` ends them in the opposite one."""
    clock, rng = time.monotonic, random.Random(config.seed)
    policy = policy_by_name(config.policy)
    compile_all()
    bus = await NatsBus.connect(config.nats, name="warmroute-router", wait_s=_BUS_WAIT_S)
    stack.push_async_callback(bus.close)
    session = serving_http.client_session()
    stack.push_async_callback(session.close)
    reader = PromptReader(config.tokenizers, session)
    stack.callback(reader.close)
    await reader.load()
    metrics = RouterMetrics(new_registry())
    catalog, ledger = IndexCatalog(), LoadLedger(clock)
    predicted = PredictedPrefixes(config.predicted_ttl_s)
    fleet = Fleet(ledger, Breakers(), clock)
    consumer = EventConsumer(
        bus,
        catalog,
        clock=clock,
        rng=rng,
        lease_s=config.lease_s,
        grace_s=config.grace_s,
        on_change=fleet.on_change,
    )
    fleet.follow(consumer.workers)
    placer = Placer(
        fleet=fleet, catalog=catalog, predicted=predicted, ledger=ledger, policy=policy, rng=rng, clock=clock
    )
    router = Router(
        config=config, bus=bus, consumer=consumer, catalog=catalog, ledger=ledger,
        fleet=fleet,
        placer=placer, reader=reader, session=session, metrics=metrics, in_flight=InFlight(),
        receipts=Receipts(config.receipts),
    )  # fmt: skip
    metrics.registry.register(StateCollector(router))
    metrics.registry.register(ConsumerCollector(consumer))
    await consumer.start()
    stack.push_async_callback(consumer.stop)
    return router


async def _housekeeping(router: Router) -> None:
    """Bounded steps of index upkeep, and forgetting of workers that left."""
    tidy_at = 0.0
    while True:
        router.catalog.upkeep()
        now = time.monotonic()
        if now >= tidy_at:
            router.fleet.tidy()
            tidy_at = now + _TIDY_EVERY_S
        await asyncio.sleep(_UPKEEP_EVERY_S)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
