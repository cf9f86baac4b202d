"""The upstream behind the proxies of bench/http_stacks.py: server-sent events over a bare asyncio protocol.

An upstream written with aiohttp reaches about as many requests/s as the faster proxies do, and would hide
what they can; this one costs a fraction of a proxy.  It is told apart from a worker by nothing on the wire.
"""

import asyncio
import json
import re
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

EVENT_BYTES = 200
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_NOT_SEEN_S = 2.0


def event(index: int) -> bytes:
    """The server-sent event of this index, EVENT_BYTES long."""
    head = b'data: {"index":%d,"text":"' % index
    return head + b"t" * (EVENT_BYTES - len(head) - 4) + b'"}\n\n'


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_FRAMES = [_frame(event(index)) for index in range(256)]


class Held:
    """What is known of one request that is followed by its id."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.acknowledged = asyncio.Semaphore(0)
        self.cancelled_at: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()


class Connection(asyncio.Protocol):
    """One keep-alive connection.  Times are `time.monotonic`, one clock for all processes of a machine."""

    def __init__(self, held: dict[str, Held]) -> None:
        self._held = held
        self._data = b""
        self._answering: asyncio.Task[None] | None = None
        self._following: Held | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request once its body is complete."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        length = _LENGTH.search(head)
        if length is not None and len(body) < int(length[1]):
            return
        self._data = b""
        target = urlsplit(head.split(b" ", 2)[1].decode())
        handler = _ROUTES.get(target.path)
        if handler is None or b"\r\ntransfer-encoding" in head.lower():
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        self._answering = asyncio.create_task(handler(self, dict(parse_qsl(target.query))))

    def connection_lost(self, error: Exception | None) -> None:
        """The other side has gone: this is what `/cancelled` tells."""
        if self._following is not None and not self._following.cancelled_at.done():
            self._following.cancelled_at.set_result(time.monotonic())
        if self._answering is not None:
            self._answering.cancel()

    async def stream(self, query: dict[str, str]) -> None:
        """`chunks` events, `gap_ms` apart.  Without a gap each event still leaves in a write of its own."""
        gap = float(query.get("gap_ms", 0)) / 1e3
        self._transport.write(_HEAD + _FRAMES[0])
        for index in range(1, int(query["chunks"])):
            await asyncio.sleep(gap)
            self._transport.write(_FRAMES[index])
        self._transport.write(_END)

    async def gated(self, query: dict[str, str]) -> None:
        """Sends an event only after the client has acknowledged the one before: a buffering proxy hangs."""
        gate = self._of(query).acknowledged
        self._transport.write(_HEAD)
        for index in range(int(query["chunks"])):
            self._transport.write(_FRAMES[index])
            await gate.acquire()
        self._transport.write(_END)

    async def endless(self, query: dict[str, str]) -> None:
        """`gap_ms` > 0: events without end; 0: not even a head, as in a long prefill."""
        gap = float(query["gap_ms"]) / 1e3
        self._following = self._of(query)
        self._following.begun.set()
        if gap:
            self._transport.write(_HEAD)
            while not self._following.cancelled_at.done():
                self._transport.write(_FRAMES[0])
                await asyncio.sleep(gap)
        await self._following.cancelled_at
        self._transport.write(_END if gap else _HEAD + _END)

    async def acknowledge(self, query: dict[str, str]) -> None:
        """One more event of the gated answer may leave."""
        self._of(query).acknowledged.release()
        self._json({})

    async def begun(self, query: dict[str, str]) -> None:
        """Answers once the endless request is here."""
        await self._of(query).begun.wait()
        self._json({})

    async def cancelled(self, query: dict[str, str]) -> None:
        """When the endless request was cancelled; null if not within two seconds, and it is ended then."""
        cancelled_at = self._of(query).cancelled_at
        await asyncio.wait((cancelled_at,), timeout=_NOT_SEEN_S)
        if not cancelled_at.done():
            cancelled_at.set_result(None)
        self._json({"at": cancelled_at.result()})

    def _of(self, query: dict[str, str]) -> Held:
        name = query["id"]
        if name not in self._held:
            self._held[name] = Held()
        return self._held[name]

    def _json(self, value: dict[str, float | None]) -> None:
        body = json.dumps(value).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


_ROUTES = {
    "/stream": Connection.stream, "/gated": Connection.gated, "/endless": Connection.endless,
    "/acknowledge": Connection.acknowledge, "/begun": Connection.begun, "/cancelled": Connection.cancelled,
}  # fmt: skip


async def serve(port: int) -> None:
    """Serve on 127.0.0.1 until cancelled."""
    held: dict[str, Held] = {}
    server = await asyncio.get_running_loop().create_server(lambda: Connection(held), "127.0.0.1", port)
    await server.serve_forever()
