"""Which processes make a stack, in which order they start, and how they end."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from serving.config import ENV_PREFIX
from warmroute.up import broker, ports
from warmroute.up.child import Child, Event, Parse
from warmroute.up_config import UpConfig

R = TypeVar("R")

OnEvent = Callable[[str, Event], None]

_OWN_FILE = ENV_PREFIX + "CONFIG"
"""Names the settings of `up` itself; the children must not read it as theirs."""


class StackError(Exception):
    """A process ended by itself, or was too slow to start; `child` is that process."""

    def __init__(self, message: str, child: Child) -> None:
        super().__init__(message)
        self.child = child


class Stack:
    """Broker, workers and router; `start` once, `stop` always."""

    def __init__(self, config: UpConfig, folder: Path, on_event: OnEvent) -> None:
        self.config = config
        self.children: list[Child] = []
        self._folder = folder
        self._on_event = on_event
        self._first_end: asyncio.Future[StackError] = asyncio.get_running_loop().create_future()

    @property
    def worker_names(self) -> list[str]:
        """The workers' ids."""
        return [f"worker-{number}" for number in range(self.config.workers)]

    async def start(self) -> str:
        """Start everything; returns the router's address when every process has said that it is ready.

        The broker comes first, since the others connect to it; workers and router then start together.
        Raises `StackError`, `BrokerMissing`.
        """
        return await self.guard(self._start())

    async def guard(self, work: Coroutine[Any, Any, R]) -> R:
        """The result of `work`, which is given up when a process ends: then raises `StackError`."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._first_end}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._first_end.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def stop(self, grace_s: float | None = None) -> None:
        """End every process, the router first so that no prompt meets a worker that is going, the broker last."""
        grace = self.config.stop_grace_s if grace_s is None else grace_s
        order = {"router": 0, "broker": 2}
        for rank in range(3):
            group = [child for child in self.children if order.get(child.name, 1) == rank]
            await asyncio.gather(*(child.stop(grace) for child in group))

    def kill(self) -> None:
        """End every process at once."""
        for child in self.children:
            child.kill()

    async def _spawn(self, name: str, command: list[str], parse: Parse, *, merge_stderr: bool = False) -> Child:
        environ = {key: value for key, value in os.environ.items() if key != _OWN_FILE}
        child = await Child.start(
            name, command, log=self._folder / f"{name}.log", parse=parse, on_event=self._on_event, on_end=self._ended,
            environ=environ, merge_stderr=merge_stderr,
        )  # fmt: skip
        self.children.append(child)
        self._on_event(name, {"event": "started", "pid": child.pid})
        return child

    async def _start(self) -> str:
        config = self.config
        nats = await self._ready(
            await self._spawn("broker", broker.command(config.nats_port), broker.LogReader(), merge_stderr=True)
        )
        router = await self._spawn("router", self._router_command(nats), read_event)
        workers = [await self._spawn(name, self._worker_command(name, nats), read_event) for name in self.worker_names]
        addresses = await asyncio.gather(*(self._ready(child) for child in (router, *workers)))
        return addresses[0]

    async def _ready(self, child: Child) -> str:
        try:
            event = await asyncio.wait_for(asyncio.shield(child.ready), self.config.start_timeout_s)
        except TimeoutError:
            raise StackError(f"{child.name} was not ready after {self.config.start_timeout_s:g} s", child) from None
        return str(event["address"])

    def _ended(self, child: Child, status: int) -> None:
        if not self._first_end.done():
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._first_end.set_result(StackError(f"{child.name} {how}", child))

    def _router_command(self, nats: str) -> list[str]:
        config = self.config
        port = ports.wanted_or_any(config.host, config.port)
        return [
            *_warmroute("router"), "--host", config.host, "--port", str(port), "--nats", nats,
            "--policy", config.policy,
        ]  # fmt: skip

    def _worker_command(self, name: str, nats: str) -> list[str]:
        config = self.config
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.workers)
        return [
            *_warmroute("worker"), "--id", name, "--model", config.model, "--host", "127.0.0.1", "--port", "0",
            "--nats", nats, "--cache-gb", str(config.cache_gb), "--threads", str(threads),
        ]  # fmt: skip


def read_event(line: str) -> Event | None:
    """An event of one of our own processes: a JSON object with the key "event"; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _warmroute(command: str) -> list[str]:
    return [sys.executable, "-m", "warmroute.cli", command]
