"""The processes of bench/http_stacks.py: one streaming proxy for each HTTP stack, and their upstream.

    python bench/http_stack_servers.py NAME PORT [UPSTREAM_URL]

Every proxy does the same work: read the request body, POST it to the upstream with the same path, query and end
headers, pass status, headers and body through as they arrive, and drop the upstream when the client goes away.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from http_stack_upstream import serve

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host",
     b"content-length", b"date", b"server")
)  # fmt: skip
_UPSTREAM_VARIABLE = "HTTP_STACKS_UPSTREAM"


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """The headers that are not about one connection."""
    return [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name.lower() not in _HOP_BY_HOP
    ]


def client_session() -> aiohttp.ClientSession:
    """The aiohttp client of four of the candidates."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        # A default Content-Type or User-Agent would change the request on its way.
        skip_auto_headers=("User-Agent", "Content-Type", "Accept", "Accept-Encoding"),
    )


def aiohttp_app(upstream: str) -> web.Application:
    """aiohttp on both sides."""
    app = web.Application()
    session_key = web.AppKey("session", aiohttp.ClientSession)

    async def session_of(app: web.Application) -> AsyncIterator[None]:
        async with client_session() as app[session_key]:
            yield

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with request.app[session_key].post(
            upstream + request.path_qs, data=body, headers=end_to_end(request.raw_headers)
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.headers.extend(end_to_end(answer.raw_headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app.cleanup_ctx.append(session_of)
    app.router.add_post("/{path:.*}", forward)
    return app


class PlainAsgi:
    """An ASGI application without a framework, aiohttp as client."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        # `send` does not tell that the client has gone, so another task listens for it and cancels this one.
        current = asyncio.current_task()
        assert current is not None
        gone = asyncio.create_task(_cancel_on_disconnect(receive, current))
        try:
            await self._forward(scope, body, send, gone)
        except asyncio.CancelledError:
            if not gone.done():
                raise
        finally:
            gone.cancel()

    async def _forward(self, scope: Message, body: bytes, send: Send, gone: "asyncio.Task[None]") -> None:
        assert self._session is not None
        url = f"{self._upstream}{scope['path']}?{scope['query_string'].decode('latin-1')}"
        async with self._session.post(url, data=body, headers=end_to_end(scope["headers"])) as answer:
            kept = [(n.lower(), v) for n, v in answer.raw_headers if n.lower() not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            gone.cancel()  # a complete answer is reported as a disconnect too
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        async with client_session() as self._session:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


async def _cancel_on_disconnect(receive: Receive, task: "asyncio.Task[Any]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def starlette_app(upstream: str, client: str) -> Any:
    """Starlette as its documentation has it: the handler opens the upstream, StreamingResponse iterates it."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def forward_aiohttp(request: Request) -> StreamingResponse:
        url = f"{upstream}{request.url.path}?{request.url.query}"
        body, headers = await request.body(), end_to_end(request.headers.raw)
        answer = await request.state.session.post(url, data=body, headers=headers)

        async def chunks() -> AsyncIterator[bytes]:
            async with answer:
                async for chunk in answer.content.iter_any():
                    yield chunk

        return StreamingResponse(chunks(), answer.status, dict(end_to_end(answer.raw_headers)))

    async def forward_httpx(request: Request) -> StreamingResponse:
        url = f"{upstream}{request.url.path}?{request.url.query}"
        sent = request.state.session.build_request(
            "POST", url, content=await request.body(), headers=end_to_end(request.headers.raw)
        )
        answer = await request.state.session.send(sent, stream=True)

        async def chunks() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answer):
                async for chunk in answer.aiter_raw():
                    yield chunk

        return StreamingResponse(chunks(), answer.status_code, dict(end_to_end(answer.headers.raw)))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with client_session() if client == "aiohttp" else _httpx_client() as session:
            yield {"session": session}

    forward = forward_aiohttp if client == "aiohttp" else forward_httpx
    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])], lifespan=lifespan)


def _httpx_client() -> Any:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits)


def granian_app() -> PlainAsgi:
    """What granian's worker process builds."""
    return PlainAsgi(os.environ[_UPSTREAM_VARIABLE])


def serve_uvicorn(app: Any, port: int) -> None:
    """One process, uvloop, httptools."""
    import uvicorn

    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        access_log=False,
    )


def serve_granian(upstream: str, port: int) -> None:
    """One worker process under granian's supervisor, uvloop."""
    from granian import Granian
    from granian.constants import Interfaces, Loops

    os.environ[_UPSTREAM_VARIABLE] = upstream
    os.chdir(Path(__file__).resolve().parent)
    target = f"{Path(__file__).stem}:granian_app"
    Granian(target, port=port, interface=Interfaces.ASGI, loop=Loops.uvloop, factory=True, log_enabled=False).serve()  # type: ignore[attr-defined,unused-ignore]


def serve_aiohttp(app: web.Application, port: int) -> None:
    """One process, uvloop; handlers are cancelled when their client goes away."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    web.run_app(
        app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True,
        shutdown_timeout=1.0,
    )  # fmt: skip


CANDIDATES: dict[str, Callable[[str, int], None]] = {
    "aiohttp+aiohttp": lambda upstream, port: serve_aiohttp(aiohttp_app(upstream), port),
    "asgi-uvicorn+aiohttp": lambda upstream, port: serve_uvicorn(PlainAsgi(upstream), port),
    "asgi-granian+aiohttp": serve_granian,
    "starlette-uvicorn+aiohttp": lambda upstream, port: serve_uvicorn(starlette_app(upstream, "aiohttp"), port),
    "starlette-uvicorn+httpx": lambda upstream, port: serve_uvicorn(starlette_app(upstream, "httpx"), port),
}
"""Server + client by name; called with the upstream's address and a port, they serve until SIGTERM."""


def main() -> None:
    """Serve one of them."""
    name, port = sys.argv[1], int(sys.argv[2])
    if name == "upstream":
        uvloop.run(serve(port))
    else:
        CANDIDATES[name](sys.argv[3], port)


if __name__ == "__main__":
    main()
