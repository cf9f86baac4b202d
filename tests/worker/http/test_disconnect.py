"""A client that goes away frees its request's blocks, wherever the request is."""

import asyncio
from typing import Any

import aiohttp
import pytest

from ..conftest import Serve
from ..world import Served, prompt_of, until


async def leave(served: Served, stream: bool, **body: Any) -> None:
    """Send a long request, wait until it runs, and close the connection."""
    payload = {"model": "tiny", "max_tokens": 1500, "ignore_eos": True, "stream": stream} | body
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(served.address + "/v1/completions", json=payload))
        await served.running()
        if stream:
            response = await request
            await response.content.readany()
            response.close()
        else:
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_it_runs_frees_the_blocks(served: Served, stream: bool) -> None:
    free = served.free_blocks
    await leave(served, stream, prompt=prompt_of(30))
    await served.idle()
    assert served.free_blocks == free
    counters = served.worker.engine.core.counters
    assert counters.finished["abort"] == 1
    assert counters.generated_tokens < 1500
    assert (await served.complete("x", max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_leaving_ends_every_choice(served: Served) -> None:
    await leave(served, True, prompt=[prompt_of(5, seed=1), prompt_of(5, seed=2)], n=2)
    await served.idle()
    assert served.worker.engine.core.counters.finished["abort"] == 4


async def test_leaving_the_queue_leaves_no_trace(serve: Serve) -> None:
    async with serve(max_requests=1, max_waiting=1) as served:
        first = asyncio.create_task(served.complete("x", max_tokens=400, ignore_eos=True))
        await served.running()
        waiting = asyncio.create_task(served.complete("y", max_tokens=5))
        await until(lambda: served.worker.engine.waiting == 1, "the second request waits")
        assert (await served.refused("/v1/completions", prompt="z"))["code"] == "queue_full"
        waiting.cancel()
        await until(lambda: not served.worker.engine.waiting, "the queue is empty")
        third = asyncio.create_task(served.complete("z", max_tokens=3))
        assert (await first)["usage"]["completion_tokens"] == 400
        assert (await third)["usage"]["completion_tokens"] == 3


async def test_many_clients_that_come_and_go_leave_an_empty_batch(served: Served) -> None:
    free = served.free_blocks

    async def come_and_go(n: int) -> None:
        body = {"model": "tiny", "prompt": prompt_of(20 + n, seed=n), "max_tokens": 300, "stream": n % 2 == 0}
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(0.01 * n):
                    async with session.post(served.address + "/v1/completions", json=body) as response:
                        await response.read()
            except TimeoutError:
                pass

    await asyncio.gather(*(come_and_go(n) for n in range(24)))
    await served.idle()
    assert served.free_blocks == free
    served.worker.engine.core.context.check_integrity()
