"""A worker process from its first line to its end: ready line, heartbeats, SIGTERM in the middle of a stream."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvevents.bus import Incoming, NatsBus
from kvevents.types import Beat, decode_beat
from serving.sse import SSEParser
from warmroute.up import broker

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Process:
    """A `warmroute worker` and what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []

    @classmethod
    async def start(cls, *flags: str) -> "Process":
        words = [sys.executable, "-m", "warmroute.cli", "worker", "--threads", "1", "--cache-gb", "0.05", *flags]
        return cls(await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE))

    async def ready(self) -> str:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == "ready":
                return str(self.events[-1]["address"])
        raise AssertionError(f"the worker ended with {await self._process.wait()}; it said {self.events}")

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        return await asyncio.wait_for(self._process.wait(), 60)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
async def nats() -> AsyncIterator[str]:
    """A broker of this test's own; it says its port in its log, before it says that it is ready."""
    found = str(broker.find())
    process = await asyncio.create_subprocess_exec(found, "-a", "127.0.0.1", "-p", "-1", stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    address, line = "", b""
    while b"Server is ready" not in line:
        line = await process.stderr.readline()
        assert line, "the broker ended"
        listens = re.search(rb"Listening for client connections on (\S+)", line)
        address = listens.group(1).decode() if listens else address
    yield f"nats://{address}"
    process.terminate()
    await process.communicate()


async def test_sigterm_tells_the_fleet_finishes_the_stream_and_ends_with_zero(nats: str) -> None:
    beats: list[Beat] = []
    bus = await NatsBus.connect(nats)

    def hear(incoming: Incoming) -> None:
        beats.append(decode_beat(incoming.data))

    await bus.subscribe("kv.v1.beat.>", hear)
    process = await Process.start("--id", "w1", "--nats", nats)
    try:
        address = await process.ready()
        whats = [event["what"] for event in process.events if event["event"] == "progress"]
        assert "loading weights" in whats
        assert whats[-1] == "warming up"
        assert process.events[-1]["id"] == "w1"
        body = {
            "model": "smollm2-135m-instruct", "prompt": "Once upon a time", "max_tokens": 40, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        parser, events = SSEParser(), []
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{address}/v1/completions", json=body) as response,
        ):
            events += parser.feed(await response.content.readany())
            process.terminate()
            async for data in response.content.iter_any():
                events += parser.feed(data)
        assert events[-1].is_done
        assert json.loads(events[-2].data)["usage"]["completion_tokens"] == 40
        assert await process.ended() == 0
    finally:
        await process.kill()
        await bus.close()
    states = [beat.state for beat in beats]
    assert states[0] == "ready"
    assert "draining" in states[:-1]
    assert states[-1] == "stopped"
    last = beats[-1].sources[0]
    assert last.blocks == 43 // 16
    assert last.load.running == 0
    assert beats[-1].address == address
    assert beats[-1].model == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--max-sequence-length", "100000"), "100000"),
    ],
)
async def test_a_worker_that_cannot_start_says_why_and_fails(
    flags: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = await Process.start(*flags)
    try:
        assert await process.ended() == 1
    finally:
        await process.kill()
    errors = capfd.readouterr().err
    assert "worker.start_failed" in errors
    assert told in errors
    assert "Traceback" not in errors
