"""Real processes for the tests: started by their command line, ready when they say so, gone at the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from warmroute.proof import computable
from warmroute.up.broker import LogReader, command
from warmroute.up.stack import read_event

MODEL = "smollm2-135m-instruct"
START_S = 180.0


class Running:
    """A process with its ready event and its log."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        *,
        parse: Callable[[str], Mapping[str, Any] | None] = read_event,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.address = ""
        self._parse = parse
        self._ready = threading.Event()
        self.popen = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env=dict(os.environ) | dict(environ or {}),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_ready(self) -> str:
        """The address, once the process says that it is ready."""
        self._ready.wait(START_S)
        assert self.address, f"not ready: {self.popen.args}\n{self.log.read_text()}"
        return self.address

    def stop(self) -> int:
        """SIGTERM and wait; a process that does not end is killed and fails the test."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._thread.join(10)
            assert self.popen.stdout is not None
            self.popen.stdout.close()

    def kill(self) -> None:
        """SIGKILL."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.log.open("w") as log:
            for line in self.popen.stdout:
                log.write(line)
                log.flush()
                event = self._parse(line)
                if event is not None and event["event"] == "ready":
                    self.address = str(event["address"])
                    self._ready.set()
        self._ready.set()  # ended: nobody has to wait any longer


def warmroute(*words: str) -> list[str]:
    """A command line of ours."""
    return [sys.executable, "-m", "warmroute.cli", *words]


@dataclass
class Fleet:
    """Broker, router and workers."""

    nats: str
    router: str
    workers: dict[str, Running] = field(default_factory=dict)

    async def wait_all_take_prompts(self) -> None:
        """Until the router sends prompts to every worker."""
        async with aiohttp.ClientSession(self.router) as session:
            await until(lambda: self._all_taken(session))

    async def _all_taken(self, session: aiohttp.ClientSession) -> bool:
        async with session.get("/v1/workers") as response:
            rows = (await response.json())["workers"]
        return {row["worker"] for row in rows if row["takes_prompts"]} == set(self.workers)


@contextlib.contextmanager
def fleet(
    folder: Path, *workers: str, worker_words: Sequence[str] = (), router_words: Sequence[str] = ()
) -> Iterator[Fleet]:
    """Start broker, router and one worker for each name; end them at the end."""
    with contextlib.ExitStack() as stack:

        def start(name: str, words: Sequence[str], **more: Any) -> Running:
            process = Running(words, folder / f"{name}.log", **more)
            stack.callback(process.stop)
            return process

        nats = start("broker", command(0), parse=LogReader()).wait_ready()
        router = start("router", warmroute("router", "--port", "0", "--nats", nats, *router_words))
        started = {
            name: start(name, warmroute("worker", "--id", name, "--nats", nats, "--threads", "1", *worker_words))
            for name in workers
        }
        for process in (router, *started.values()):
            process.wait_ready()
        yield Fleet(nats, router.address, started)


@dataclass(slots=True)
class Answer:
    """What a client sees of one request."""

    worker: str
    overlap_blocks: int
    prompt_tokens: int
    cached_tokens: int
    text: str
    finish_reason: str

    @property
    def agrees(self) -> bool:
        """Whether the engine took from its cache what the router promised."""
        return self.cached_tokens in computable(self.overlap_blocks, self.prompt_tokens, 16)


async def chat(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], *, worker: str | None = None, max_tokens: int = 4
) -> Answer:
    """One chat request through the router, not streamed."""
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    headers = {"x-warmroute-worker": worker} if worker else {}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        raw = await response.read()
        assert response.status == 200, raw
        answer, got = json.loads(raw), response.headers
    choice, usage = answer["choices"][0], answer["usage"]
    return Answer(
        worker=got["x-warmroute-worker"],
        overlap_blocks=int(got["x-warmroute-overlap-blocks"]),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        text=choice["message"]["content"],
        finish_reason=choice["finish_reason"],
    )


async def until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait for a condition of other processes, which no event announces here."""
    import asyncio

    deadline = time.monotonic() + within_s
    while not await true():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def heard(session: aiohttp.ClientSession, messages: list[dict[str, str]], blocks: int) -> None:
    """Wait until the router knows a worker that holds at least `blocks` blocks of this conversation."""

    async def known() -> bool:
        async with session.post("/v1/route", json={"model": MODEL, "messages": messages}) as response:
            assert response.status == 200, await response.read()
            route = await response.json()
        return max(candidate["overlap_blocks"] for candidate in route["candidates"]) >= blocks

    await until(known)
