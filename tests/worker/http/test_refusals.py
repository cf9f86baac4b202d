"""What a worker refuses, with which status, and what it says."""

import asyncio
from typing import Any

import pytest

from serving.http import REQUEST_ID

from ..conftest import Serve
from ..world import Failing, Served, prompt_of


async def test_an_unknown_model_is_404(served: Served) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        messages = [{"role": "user", "content": "x"}]
        error = await served.refused(path, model="other", prompt="x", messages=messages)
        assert (error["status"], error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'tiny'" in error["message"]


async def test_a_prompt_that_is_too_long_is_400_with_all_numbers(serve: Serve) -> None:
    async with serve(max_sequence_length=64) as served:
        error = await served.refused("/v1/completions", prompt=prompt_of(50), max_tokens=20)
        assert (error["status"], error["code"]) == (400, "context_length_exceeded")
        assert all(number in error["message"] for number in ("50", "20", "64"))
        error = await served.refused("/v1/chat/completions", prompt_token_ids=prompt_of(64), messages=[])
        assert error["code"] == "context_length_exceeded"
        assert (await served.complete(prompt_of(44), max_tokens=20))["usage"]["completion_tokens"] == 20


async def test_the_pool_bounds_the_longest_sequence(serve: Serve) -> None:
    async with serve(cache_gb=0.0002) as served:
        longest = served.worker.max_length
        assert longest == (served.worker.engine.load.total_blocks) * 16
        error = await served.refused("/v1/completions", prompt=prompt_of(longest), max_tokens=1)
        assert str(longest) in error["message"]
        await served.complete(prompt_of(longest - 4), max_tokens=4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1, 49152]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "prompt_token_ids": [50000]}, "prompt_token_ids"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"60000": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
    ],
)
async def test_bad_input_is_400_and_names_the_field(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = await served.refused(path, **body)
    assert (error["status"], error["param"]) == (400, param)


async def test_a_full_queue_is_503_with_retry_after(serve: Serve) -> None:
    async with serve(max_waiting=2) as served:
        body = {"model": "tiny", "prompt": [prompt_of(4, seed=n) for n in range(3)], "max_tokens": 2}
        async with served.session.post(served.address + "/v1/completions", json=body) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert response.headers["x-warmroute-worker"] == "w"
            assert (await response.json())["error"]["code"] == "queue_full"
        await served.complete("x", max_tokens=2)


async def test_a_body_that_is_too_large_is_413(serve: Serve) -> None:
    async with serve(max_body_mb=1) as served:
        error = await served.refused("/v1/completions", prompt="x" * 2**20)
        assert error["status"] == 413


async def test_the_request_id_comes_back_with_answers_and_errors(served: Served) -> None:
    for model, status in (("tiny", 200), ("other", 404)):
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        headers = {REQUEST_ID: "abc-1"}
        async with served.session.post(served.address + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == status
            assert response.headers[REQUEST_ID] == "abc-1"
            assert response.headers["x-warmroute-worker"] == "w"


async def test_a_model_that_fails_twice_is_500_and_the_worker_serves_on(serve: Serve, tiny: Any) -> None:
    failing = Failing(tiny, lambda context: 777 in context.current_input_and_position_ids()[0])
    async with serve(model=failing) as served:
        for stream in (False, True):
            error = await served.refused("/v1/completions", prompt=[777, 5, 6], stream=stream)
            assert error["status"] == 500
            assert "failed twice" in error["message"]
        assert (await served.complete("fine", max_tokens=3))["usage"]["completion_tokens"] == 3
        await served.idle()


async def test_a_failure_in_the_middle_of_a_stream_is_an_error_event(serve: Serve, tiny: Any) -> None:
    failing = Failing(tiny, lambda context: context.step_count >= 3)
    async with serve(model=failing) as served:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 50, "stream": True, "ignore_eos": True}
        async with served.session.post(served.address + "/v1/completions", json=body) as response:
            assert response.status == 200
            text = await response.text()
        assert '"error"' in text
        assert "[DONE]" not in text


async def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new(serve: Serve) -> None:
    async with serve() as served:
        running = asyncio.create_task(served.complete("One", max_tokens=200, ignore_eos=True))
        await served.running()
        served.worker.state = "draining"
        error = await served.refused("/v1/completions", prompt="x")
        assert (error["status"], error["code"]) == (503, "worker_draining")
        async with served.session.get(served.address + "/ready") as response:
            assert response.status == 503
        async with served.session.get(served.address + "/live") as response:
            assert response.status == 200
        assert (await running)["usage"]["completion_tokens"] == 200
        assert await served.worker.wait_idle(5)


async def test_a_stopped_engine_refuses_and_ends_what_runs(serve: Serve) -> None:
    async with serve() as served:
        running = asyncio.create_task(served.refused("/v1/completions", prompt="x", max_tokens=900, ignore_eos=True))
        await served.running()
        assert await asyncio.to_thread(served.worker.engine.stop)
        assert (await running)["status"] == 503
        assert (await served.refused("/v1/completions", prompt="x"))["status"] == 503
        async with served.session.get(served.address + "/live") as response:
            assert response.status == 503
