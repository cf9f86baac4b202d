"""What worker and router share of aiohttp: errors in OpenAI's form, a server on any port, a client session."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from serving.openai.errors import OpenAIError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ON_UNEXPECTED_ERROR: web.AppKey[Callable[[str], None]] = web.AppKey("on_unexpected_error")
"""An application may set this to count exceptions that no handler expected; it is called with the route."""

REQUEST_ID = "x-request-id"
_REQUEST_ID_CHARACTERS = 128

_KEEP_ALIVE_S = 15.0
"""Idle client connections live shorter than the server's, so that a request never meets one just closed."""
_SERVER_KEEP_ALIVE_S = 75.0


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure in OpenAI's form; an exception that nobody expected is logged, counted, and a 500."""
    try:
        return await handler(request)
    except OpenAIError as error:
        return error_response(error, request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(_of_http(error, request), request)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # the request ends, the process does not
        route = request.match_info.route.resource
        path = route.canonical if route is not None else "unknown"
        log.exception("http.unexpected_error", extra={"route": path, "request_id": request.headers.get(REQUEST_ID)})
        count = request.app.get(ON_UNEXPECTED_ERROR)
        if count is not None:
            count(path)
        return error_response(
            OpenAIError(500, f"Internal error: {type(error).__name__}.", type="internal_error", code="internal"),
            request,
        )


def error_response(error: OpenAIError, request: web.Request) -> web.Response:
    """The JSON answer for an error, with the request's id."""
    response = web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers
    )
    request_id = request.headers.get(REQUEST_ID)
    if request_id:
        response.headers[REQUEST_ID] = printable(request_id)
    return response


def printable(value: str, limit: int = _REQUEST_ID_CHARACTERS) -> str:
    """A header value from outside, safe to send back: printable ASCII, bounded length."""
    return "".join(c for c in value[:limit] if " " <= c <= "~")


def _of_http(error: web.HTTPException, request: web.Request) -> OpenAIError:
    headers = {}
    if error.status == 404:
        message = f"{request.method} {request.path} is not served here."
    elif error.status == 405:
        allowed = error.headers.get("Allow", "")
        message = f"{request.method} is not allowed for {request.path}; use {allowed}."
        headers["Allow"] = allowed
    elif error.status == 413:
        message = f"The body is too large: {error.text}."
    else:
        message = error.text or error.reason
    return OpenAIError(error.status, message, code=error.reason.lower().replace(" ", "_"), headers=headers)


async def start_server(
    app: web.Application, host: str, port: int, *, shutdown_timeout_s: float = 5.0
) -> tuple[web.AppRunner, int]:
    """Listen on `host` and `port` (0: a free one); the runner to clean up, and the port.

    A handler is cancelled when its client goes away.  Raises OSError when the address cannot be bound.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout_s,
        keepalive_timeout=_SERVER_KEEP_ALIVE_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
    except BaseException:
        await runner.cleanup()
        raise
    addresses: list[Any] = runner.addresses
    return runner, int(addresses[0][1])


def client_session(*, connect_timeout_s: float = 5.0) -> aiohttp.ClientSession:
    """A session for calls between our processes: no limit of connections, no total time, bodies as they come.

    Must be made inside a running event loop; the caller closes it.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )
