"""A real nats-server, a real router and stand-in workers for the router's tests."""

import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from router.config import RouterConfig
from router.main import Running, running
from warmroute.up import broker as broker_binary

from .standin import StandIn, until


class Broker:
    """A nats-server on one free loopback port; it may be stopped and started again."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._log = log
        self.url = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(broker_binary.find()), "-a", "127.0.0.1", "-p", str(self._port), "-l", str(self._log)]
        self._process = subprocess.Popen(command)
        _wait_for(self._port)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One broker for all tests of this folder that leave it alone."""
    shared = Broker(tmp_path_factory.mktemp("nats") / "log")
    shared.start()
    yield shared.url
    shared.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker of the test's own."""
    own = Broker(tmp_path / "nats-log")
    own.start()
    yield own
    own.stop()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.02)
    raise AssertionError("nats-server did not start")


class World:
    """A router, its workers, and a client."""

    def __init__(self, running: Running, client: aiohttp.ClientSession, workers: list[StandIn]) -> None:
        self.router, self.address = running.router, running.address
        self.client, self.workers = client, workers

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> aiohttp.ClientResponse:
        """POST JSON (or raw bytes) and read the whole answer."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        response = await self.client.post(self.address + path, data=data, headers=headers)
        await response.read()
        return response

    async def indexed(self) -> None:
        """Wait until the router's index holds exactly what every worker's cache holds."""
        views = self.router.fleet.workers

        def equal() -> bool:
            for worker in self.workers:
                view = views().get(worker.name)
                source = None if view is None else view.sources.get(0)
                if source is None:
                    return not worker.blocks
                if self.router.catalog.blocks_of(source.handle) != len(worker.blocks):
                    return False
            return True

        await until(equal, "index equals caches")

    async def quiet(self) -> None:
        """Wait until nothing is in flight, then check that every promise was returned."""
        await self.router.in_flight.wait_idle(5)
        assert self.router.ledger.totals() == (0, 0, 0)


MakeWorld = Callable[..., Coroutine[Any, Any, World]]


@pytest.fixture
async def make_world(nats_url: str) -> AsyncIterator[MakeWorld]:
    """`await make_world(StandIn("a"), ..., **config)` -> World whose workers are all ready."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*workers: StandIn, **config: Any) -> World:
            settings: dict[str, Any] = {"port": 0, "nats": nats_url, "seed": 5, "drain_s": 0.5} | config
            for worker in workers:
                await worker.start(settings["nats"])
                stack.push_async_callback(worker.stop)
            started = await stack.enter_async_context(running(RouterConfig(**settings)))
            client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            names = {worker.name for worker in workers}

            def ready() -> bool:
                views = started.router.fleet.workers()
                return all(n in views and started.router.fleet.why_not(views[n]) is None for n in names)

            await until(ready, "every worker is ready in the router")
            return World(started, client, list(workers))

        yield make
