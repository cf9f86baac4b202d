"""What a worker tells of itself: models, tokens, health, metrics."""

from typing import Any

from ..world import Served, prompt_of


async def get(served: Served, path: str) -> Any:
    async with served.session.get(served.address + path) as response:
        assert response.status == 200
        return await response.json()


async def test_the_served_model_is_listed(served: Served) -> None:
    (card,) = (await get(served, "/v1/models"))["data"]
    assert card["id"] == "tiny"
    assert card["max_model_len"] == served.worker.max_length
    assert (await get(served, "/v1/models/tiny")) == card


async def test_tokens_go_there_and_back(served: Served) -> None:
    status, told = await served.post("/tokenize", prompt="One two three")
    assert status == 200
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == served.worker.max_length
    _, back = await served.post("/detokenize", tokens=told["tokens"])
    assert back == {"prompt": "One two three"}


async def test_messages_are_tokenised_as_a_chat_sees_them(served: Served) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    _, told = await served.post("/tokenize", messages=messages)
    _, chat = await served.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == told["count"]
    assert told["tokens"] == served.worker.tokenizer.encode_chat(messages)


async def test_health_tells_state_and_load(served: Served) -> None:
    health = await get(served, "/health")
    assert health["status"] == "ok"
    assert health["state"] == "ready"
    assert health["blocks"]["held"] == 0
    assert (await get(served, "/ready"))["ready"] is True
    assert (await get(served, "/live")) == {"status": "live"}


async def test_metrics_have_the_names_that_gateways_scrape(served: Served) -> None:
    prompt = prompt_of(40)
    for _ in range(2):
        await served.complete(prompt, max_tokens=3)
    async with served.session.get(served.address + "/metrics") as response:
        lines = (await response.text()).splitlines()
    values = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    label = '{model_name="tiny"}'
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:num_requests_waiting{label}"] == 0
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0
    assert values[f"vllm:prompt_tokens_total{label}"] == 80
    assert values[f"vllm:generation_tokens_total{label}"] == 6
    assert values[f"vllm:prefix_cache_queries_total{label}"] == 80
    assert values[f"vllm:prefix_cache_hits_total{label}"] == 32
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    assert values['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] == 2
    blocks = served.worker.engine.load.total_blocks
    config = f'vllm:cache_config_info{{block_size="16",model_name="tiny",num_gpu_blocks="{blocks}"}}'
    assert values[config] == 1
    assert values["warmroute_worker_steps_total"] > 0
    assert values['warmroute_worker_http_requests_total{code="200",route="completion"}'] == 2
