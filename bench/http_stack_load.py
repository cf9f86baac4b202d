"""Load for bench/http_stacks.py over bare asyncio protocols, so that the client is not what is measured."""

import asyncio
import json
import re
import time
from typing import Any, NamedTuple

from http_stack_upstream import EVENT_BYTES, event

_END = b"\r\n0\r\n\r\n"
_BODY = b'{"model":"m","stream":true,"prompt":"' + b"p" * 980 + b'"}'
_ANSWER_S = 10.0


class NotStreamed(Exception):
    """A candidate's answer was not the upstream's, or not streamed."""


class Answer(NamedTuple):
    """One streamed answer.  Times are `time.perf_counter` seconds from the request's write."""

    body: bytes
    frames: int
    first_byte_s: float


class Saturation(NamedTuple):
    """A closed loop's result."""

    requests_per_s: float
    frames_per_answer: float


def request_bytes(path: str, method: bytes = b"POST", body: bytes = _BODY) -> bytes:
    """An HTTP/1.1 request with a JSON body of about 1 KiB."""
    return b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        method,
        path.encode(),
        len(body),
        body,
    )


def expected(chunks: int) -> bytes:
    """The bytes that a stream of so many events has."""
    return b"".join(map(event, range(chunks)))


def unchunk(data: bytes) -> tuple[bytes, int]:
    """Body and number of frames of a chunked answer (RFC 9112, 7.1); `data` has the head too."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in head.lower():
        raise NotStreamed(f"not a chunked answer with status 200: {head!r}")
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = rest.index(b"\r\n", at)
        size = int(rest[at:line_end], 16)
        if not size:
            return b"".join(parts), len(parts)
        parts.append(rest[line_end + 2 : line_end + 2 + size])
        at = line_end + 4 + size


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._done: asyncio.Future[Answer] | None = None
        self._arrived = asyncio.Event()
        self._began = self._first = 0.0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Collect, note the body's first byte, finish at the last frame."""
        self._data += data
        if not self._first:
            head_end = self._data.find(b"\r\n\r\n")
            if 0 <= head_end < len(self._data) - 4:
                self._first = time.perf_counter()
        self._arrived.set()
        if self._data.endswith(_END) and self._done is not None and not self._done.done():
            try:
                body, frames = unchunk(bytes(self._data))
            except NotStreamed as error:
                self._done.set_exception(error)
            else:
                self._done.set_result(Answer(body, frames, self._first - self._began))

    def connection_lost(self, error: Exception | None) -> None:
        """A connection that ends during a request fails it."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(NotStreamed(f"the connection ended after {bytes(self._data)[-80:]!r}"))

    def send(self, request: bytes) -> "asyncio.Future[Answer]":
        """Write a request; the future is its answer."""
        self._data.clear()
        self._arrived.clear()
        self._first = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()
        self.transport.write(request)
        return self._done

    async def until_bytes(self, needed: bytes) -> None:
        """Until these bytes have arrived.  Raises TimeoutError."""
        async with asyncio.timeout(_ANSWER_S):
            while needed not in self._data:
                self._arrived.clear()
                await self._arrived.wait()

    async def sized_body(self) -> bytes:
        """The body of an answer with a Content-Length.  Raises TimeoutError."""
        await self.until_bytes(b"\r\n\r\n")
        head, _, body = bytes(self._data).partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])  # type: ignore[index]
        async with asyncio.timeout(_ANSWER_S):
            while len(body) < length:
                self._arrived.clear()
                await self._arrived.wait()
                body = bytes(self._data).partition(b"\r\n\r\n")[2]
        return body

    def abandon(self) -> None:
        """Close at once, as a client that went away."""
        if self._done is not None:
            self._done.cancel()
        self.transport.abort()


async def connect(port: int) -> Connection:
    """A connection to 127.0.0.1."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def _check(answer: Answer, wanted: bytes) -> None:
    if answer.body != wanted:
        raise NotStreamed(f"{len(answer.body)} bytes differ from the {len(wanted)} that the upstream sent")


async def saturate(port: int, concurrency: int, chunks: int, seconds: float) -> Saturation:
    """As many requests as pass in a closed loop.  Every answer is compared byte for byte."""
    request, wanted = request_bytes(f"/stream?chunks={chunks}"), expected(chunks)
    connections = [await connect(port) for _ in range(concurrency)]
    answers = frames = 0
    start = time.perf_counter()

    async def client(connection: Connection) -> None:
        nonlocal answers, frames
        while time.perf_counter() < start + seconds:
            answer = await connection.send(request)
            _check(answer, wanted)
            answers += 1
            frames += answer.frames

    await asyncio.gather(*map(client, connections))
    taken = time.perf_counter() - start
    for connection in connections:
        connection.abandon()
    return Saturation(answers / taken, frames / answers)


async def spaced(port: int, rate: float, chunks: int, gap_ms: float, seconds: float) -> list[Answer]:
    """Answers at a fixed rate, whatever they take (an open loop), with their events `gap_ms` apart."""
    request, wanted = request_bytes(f"/stream?chunks={chunks}&gap_ms={gap_ms:g}"), expected(chunks)
    idle = [await connect(port) for _ in range(16)]
    start = time.perf_counter()

    async def one(index: int) -> Answer:
        await asyncio.sleep(start + index / rate - time.perf_counter())
        connection = idle.pop() if idle else await connect(port)
        answer = await connection.send(request)
        _check(answer, wanted)
        idle.append(connection)
        return answer

    answers = await asyncio.gather(*map(one, range(int(rate * seconds))))
    for connection in idle:
        connection.abandon()
    return answers


async def prove_streaming(port: int, upstream_port: int, name: str, chunks: int = 12) -> None:
    """Each event is acknowledged to the upstream, which only then sends the next.  Raises NotStreamed."""
    proxied, side = await connect(port), await connect(upstream_port)
    answer = proxied.send(request_bytes(f"/gated?chunks={chunks}&id={name}"))
    try:
        for index in range(chunks):
            await proxied.until_bytes(event(index))
            await _control(side, f"/acknowledge?id={name}")
        _check(await answer, expected(chunks))
    except TimeoutError:
        raise NotStreamed(f"{name} held an event of {EVENT_BYTES} bytes back for {_ANSWER_S:g} s") from None
    finally:
        proxied.abandon()
        side.abandon()


async def cancellation(port: int, upstream_port: int, name: str, gap_ms: float) -> float | None:
    """Seconds from the client's close until the upstream is cancelled; None if it was not within two seconds.

    `gap_ms` 0: before any byte of the answer; else in the middle of a stream.
    """
    proxied, side = await connect(port), await connect(upstream_port)
    _ = proxied.send(request_bytes(f"/endless?id={name}&gap_ms={gap_ms:g}"))
    await _control(side, f"/begun?id={name}")
    if gap_ms:
        await proxied.until_bytes(event(0))
    closed = time.monotonic()
    proxied.abandon()
    at = json.loads(await _control(side, f"/cancelled?id={name}"))["at"]
    side.abandon()
    return None if at is None else max(0.0, at - closed)


async def _control(connection: Connection, path: str) -> bytes:
    """A small exchange with the upstream itself; its answers have a Content-Length.  Returns the body."""
    answer = connection.send(request_bytes(path, b"GET", b""))
    body = await connection.sized_body()
    answer.cancel()
    return body
