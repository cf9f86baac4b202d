"""A worker small enough for fault cases: real HTTP, real events through publisher and plane, an "engine"
that only remembers blocks.
"""

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from kvevents.bus import NatsBus
from kvevents.hashing import sequence_hashes
from kvevents.publisher import EventPublisher
from kvevents.types import Beat, Load, SourceBeat, SourceId
from kvevents.worker_plane import WorkerPlane

MODEL = "stand-in"


def text_ids(text: str) -> list[int]:
    """The stand-in's tokenizer: bytes."""
    return list(text.encode())


def chat_text(messages: list[dict[str, Any]]) -> str:
    """The stand-in's chat template."""
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@dataclass
class Received:
    """One generation request as it arrived."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    cached_tokens: int
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class StandIn:
    """One worker.  `behaviour` says what the next requests meet: ok, 503, die, die-mid, hold, flood, gzip."""

    def __init__(
        self,
        name: str,
        *,
        block_size: int = 16,
        max_length: int = 4096,
        features: tuple[str, ...] = ("prompt_token_ids",),
    ) -> None:
        self.name, self.block_size, self.max_length = name, block_size, max_length
        self.features = list(features)
        self.behaviour = "ok"
        self.behaviour_of_tokenize = 200
        self.fingerprint = "bytes"
        self.state = "ready"
        self.received: list[Received] = []
        self.tokenize_calls = 0
        self.release = asyncio.Event()
        self.sent_bytes = 0
        self.load = Load(0, 0, 0, 0, 0, 1000)
        self.blocks: set[int] = set()
        self.publisher = EventPublisher(SourceId(name, 0), MODEL, block_size)

    async def start(self, nats: str) -> None:
        """Listen on a free port, then announce."""
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.generate),
                web.post("/v1/completions", self.generate),
                web.post("/tokenize", self.tokenize),
            ]
        )
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.bus = await NatsBus.connect(nats)
        self.plane = WorkerPlane(self.bus, [self.publisher], self.beat)
        await self.plane.start()

    async def stop(self) -> None:
        """Say goodbye and close."""
        await self.plane.stop()
        await self.bus.close()
        await self.runner.cleanup()

    async def stop_listening(self) -> None:
        """Die as seen by HTTP, while heartbeats go on (a hung or half-dead process)."""
        await self.runner.cleanup()

    def beat(self) -> Beat:
        """The heartbeat."""
        state = self.publisher.state()
        return Beat(
            version=1, worker=self.name, model=MODEL, address=f"http://127.0.0.1:{self.port}",
            block_size=self.block_size, capacity_blocks=1000, max_sequence_length=self.max_length,
            tokenizer=self.fingerprint, state=self.state, sent_at=time.time(), features=self.features,
            sources=[SourceBeat(0, state.epoch, state.seq, state.blocks, state.digest, self.load)],
        )  # fmt: skip

    def cache(self, ids: list[int]) -> int:
        """Take a prompt into the cache and announce what is new.  Returns the cached tokens before."""
        hashes = [int(h) for h in sequence_hashes(np.array(ids, dtype=np.uint32), self.block_size)]
        held = next((i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes))
        if held < len(hashes):
            self.publisher.listener(
                "stored",
                {
                    "block_hashes": hashes[held:],
                    "token_ids": ids[held * self.block_size : len(hashes) * self.block_size],
                    "num_block_tokens": [self.block_size] * (len(hashes) - held),
                    "parent_hash": hashes[held - 1] if held else None,
                },
            )
            self.publisher.end_step()
            self.blocks.update(hashes)
        return held * self.block_size

    async def tokenize(self, request: web.Request) -> web.Response:
        """The worker's own tokenizer over HTTP."""
        self.tokenize_calls += 1
        if self.behaviour_of_tokenize != 200:
            return web.Response(status=self.behaviour_of_tokenize)
        ids = _ids_of(await request.json())
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.max_length})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer as `behaviour` says."""
        raw = await request.read()
        body = json.loads(raw)
        behaviour = self.behaviour
        if behaviour == "503":
            self.received.append(Received(request.path, raw, request.headers, 0))
            return web.json_response({"error": {"message": "full"}}, status=503)
        ids = _ids_of(body)
        got = Received(request.path, raw, request.headers, self.cache(ids))
        self.received.append(got)
        if behaviour == "die":
            _cut(request)
        usage = {
            "prompt_tokens": len(ids), "completion_tokens": 3, "total_tokens": len(ids) + 3,
            "prompt_tokens_details": {"cached_tokens": got.cached_tokens},
        }  # fmt: skip
        try:
            if not body.get("stream"):
                if behaviour == "hold":
                    await self.release.wait()
                if behaviour == "gzip":
                    packed = gzip.compress(json.dumps({"choices": [{"text": "abc"}]}).encode())
                    return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
                return web.json_response({"id": "x", "choices": [{"text": "abc"}], "usage": usage})
            return await self._stream(request, behaviour, usage)
        except (asyncio.CancelledError, ConnectionError):
            got.gone.set()
            raise

    async def _stream(self, request: web.Request, behaviour: str, usage: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Engine": "stand-in"})
        await response.prepare(request)
        for number in range(3):
            await response.write(_event({"choices": [{"delta": {"content": str(number)}}]}))
            if behaviour == "die-mid":
                _cut(request)
                return response
            if behaviour == "hold":
                await self.release.wait()
            while behaviour == "flood":
                chunk = _event({"choices": [{"delta": {"content": "x" * 65536}}]})
                await response.write(chunk)
                self.sent_bytes += len(chunk)
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def _ids_of(body: dict[str, Any]) -> list[int]:
    if body.get("prompt_token_ids") is not None:
        return list(body["prompt_token_ids"])
    if "messages" in body:
        return text_ids(chat_text(body["messages"]))
    prompt = body["prompt"]
    if isinstance(prompt, str):
        return text_ids(prompt)
    return list(prompt) if not prompt or isinstance(prompt[0], int) else text_ids(str(prompt[0]))


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll a condition that has no event of its own.  Raises AssertionError that says what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.01)
