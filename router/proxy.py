"""Streams one request to one worker and the answer back: no buffering, back-pressure, and a worker's death
told apart by phase.

`open_upstream` ends when the answer's first bytes are here: until then another worker may be tried, for the
client has seen nothing.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
     "transfer-encoding", "upgrade", "proxy-connection")
)  # fmt: skip
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "content-length", "expect"}
_TRY_ANOTHER = frozenset((502, 503, 504))
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_CACHED_TAIL = 64


class UpstreamFailed(Exception):
    """A worker did not begin an answer.  `kind` is a metric label: connect, timeout, 5xx, died."""

    def __init__(self, kind: str, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.status = kind, detail, status


class MidStreamFailure(Exception):
    """A worker stopped in the middle of its answer: died or idle."""


@dataclass(slots=True, frozen=True)
class Timeouts:
    """Seconds for each phase of one request."""

    connect: float
    first_byte: float
    idle: float


class Upstream:
    """An answer that has begun.  Iterate `chunks` once; `close` in every case."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, idle_s: float) -> None:
        self._response, self._first, self._idle_s = response, first, idle_s
        self._complete = False
        self._tail = b""
        self.cached_tokens: int | None = None
        """What the engine says it took from its cache, once usage has passed."""

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return self._response.content_type == "text/event-stream"

    def headers(self) -> CIMultiDict[str]:
        """The worker's headers that belong to the answer, not to its connection."""
        return _without(self._response.headers, _HOP_BY_HOP)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives.  Raises MidStreamFailure when it ends before its end."""
        if self._first:
            self._watch(self._first)
            yield self._first
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    chunk = await self._response.content.readany()
            except TimeoutError as error:
                raise MidStreamFailure(f"the worker sent nothing for {self._idle_s:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise MidStreamFailure(f"the connection to the worker broke: {type(error).__name__}") from error
            if not chunk:
                self._complete = True
                return
            self._watch(chunk)
            yield chunk

    def close(self) -> None:
        """Give the connection back after a complete answer, else close it at once, which tells the worker
        to stop.
        """
        if self._complete:
            self._response.release()
        else:
            self._response.close()

    def _watch(self, chunk: bytes) -> None:
        """Note the engine's cached tokens as they pass; they may lie across two chunks."""
        seen = self._tail + chunk
        for found in _CACHED_TOKENS.finditer(seen):
            if found.end() < len(seen):
                self.cached_tokens = int(found.group(1))
        self._tail = seen[-_CACHED_TAIL:]


async def open_upstream(
    session: aiohttp.ClientSession,
    url: str,
    *,
    headers: CIMultiDictProxy[str] | CIMultiDict[str],
    added: dict[str, str],
    body: bytes,
    timeouts: Timeouts,
) -> Upstream:
    """POST a body and wait for the first bytes of the answer.

    Raises UpstreamFailed; nothing has reached the client then.
    """
    sent = _without(headers, _NOT_FORWARDED)
    sent.update(added)
    response: aiohttp.ClientResponse | None = None
    try:
        async with asyncio.timeout(timeouts.first_byte):
            response = await session.post(
                url,
                data=body,
                headers=sent,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
            )
            if response.status in _TRY_ANOTHER:
                detail = (await response.content.read(4096)).decode(errors="replace")
                raise UpstreamFailed("5xx", f"answered {response.status}: {detail}", response.status)
            first = await response.content.readany()
        upstream, response = Upstream(response, first, timeouts.idle), None
        return upstream
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UpstreamFailed("connect", f"no connection: {error}") from error
    except TimeoutError as error:
        raise UpstreamFailed("timeout", f"no first byte within {timeouts.first_byte:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFailed("died", f"died before the first byte: {type(error).__name__}") from error
    finally:
        if response is not None:
            response.close()


def _without(headers: CIMultiDictProxy[str] | CIMultiDict[str], names: frozenset[str]) -> CIMultiDict[str]:
    """A copy without some headers and without those that `Connection` names."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in names and name.lower() not in named
    )
