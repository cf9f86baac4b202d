"""Errors leave in OpenAI's form, whatever went wrong, and a gone client cancels its handler."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from serving.http import ON_UNEXPECTED_ERROR, REQUEST_ID, client_session, error_middleware, start_server
from serving.openai import OpenAIError


async def _refuse(_request: web.Request) -> web.Response:
    raise OpenAIError(503, "full", type="overloaded", code="queue_full", headers={"Retry-After": "2"})


async def _break(_request: web.Request) -> web.Response:
    raise KeyError("secret detail")


async def _read(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


class Server:
    """A server on a free port with handlers that fail in different ways."""

    def __init__(self) -> None:
        self.counted: list[str] = []
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def _hang(self, _request: web.Request) -> web.Response:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("unreachable")

    async def start(self) -> None:
        app = web.Application(middlewares=[error_middleware], client_max_size=100)
        app[ON_UNEXPECTED_ERROR] = self.counted.append
        app.add_routes([web.get("/refuse", _refuse), web.get("/break/{id}", _break), web.get("/hang", self._hang)])
        app.add_routes([web.post("/read", _read)])
        self.runner, port = await start_server(app, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{port}"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.runner.cleanup()


async def test_an_openai_error_keeps_status_headers_and_request_id(server: Server) -> None:
    async with (
        client_session() as session,
        session.get(f"{server.address}/refuse", headers={REQUEST_ID: "abc"}) as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "2"
        assert response.headers[REQUEST_ID] == "abc"
        error = (await response.json())["error"]
    assert error == {"message": "full", "type": "overloaded", "param": None, "code": "queue_full"}
    assert server.counted == []


async def test_an_unexpected_exception_is_a_500_that_tells_no_detail_and_is_counted(server: Server) -> None:
    async with client_session() as session, session.get(f"{server.address}/break/7") as response:
        assert response.status == 500
        error = (await response.json())["error"]
    assert error["type"] == "internal_error"
    assert "secret" not in error["message"]
    assert server.counted == ["/break/{id}"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/read", 405), ("POST", "/read", 413)]
)
async def test_errors_of_http_itself_have_the_same_form(server: Server, method: str, path: str, status: int) -> None:
    async with (
        client_session() as session,
        session.request(method, server.address + path, data=b"x" * 200) as response,
    ):
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_a_client_that_goes_away_cancels_the_handler(server: Server) -> None:
    async with client_session() as session:
        request = asyncio.create_task(session.get(f"{server.address}/hang"))
        await asyncio.wait_for(server.entered.wait(), 5)
        request.cancel()
        with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
            await request
        await asyncio.wait_for(server.cancelled.wait(), 5)
