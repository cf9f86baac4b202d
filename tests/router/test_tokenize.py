"""Token ids come from a local tokenizer that equals the worker's, else from the worker, else the router
says why not.
"""

import json
from pathlib import Path

import pytest

from serving.model_files import ModelFileError, resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer

from .conftest import MakeWorld
from .standin import MODEL, StandIn


@pytest.fixture(scope="module")
def model_file() -> Path:
    try:
        return resolve_model("smollm2")
    except ModelFileError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_tokenizer(model_file)


MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Grüße, 世界 🙂 <|im_end|> 12345"},
]


async def test_a_local_tokenizer_sends_the_ids_that_the_engine_itself_would_use(
    make_world: MakeWorld, model_file: Path, tokenizer: Tokenizer
) -> None:
    worker = StandIn("a")
    worker.fingerprint = tokenizer.fingerprint
    world = await make_world(worker, tokenizers={MODEL: str(model_file)})
    await world.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES})
    assert json.loads(worker.received[0].body)["prompt_token_ids"] == tokenizer.encode_chat(MESSAGES)
    await world.post("/v1/completions", {"model": MODEL, "prompt": "Once upon a time"})
    ids = tokenizer.encode("Once upon a time", add_special_tokens=True)
    assert json.loads(worker.received[1].body)["prompt_token_ids"] == ids
    assert worker.tokenize_calls == 0
    assert world.router.reader.counts["local"] == 2


async def test_every_field_that_changes_the_prompt_changes_its_tokens(
    make_world: MakeWorld, model_file: Path, tokenizer: Tokenizer
) -> None:
    worker = StandIn("a")
    worker.fingerprint = tokenizer.fingerprint
    world = await make_world(worker, tokenizers={MODEL: str(model_file)})
    variants = [
        {"messages": MESSAGES},
        {"messages": MESSAGES[1:]},
        {"messages": MESSAGES, "add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Hello"}]},
        {"messages": [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "parts"}]}]},
    ]
    for variant in variants:
        await world.post("/v1/chat/completions", {"model": MODEL, **variant})
    sent = [tuple(json.loads(received.body)["prompt_token_ids"]) for received in worker.received]
    assert len(set(sent)) == len(variants)


async def test_another_fingerprint_is_noticed_and_the_worker_is_asked_instead(
    make_world: MakeWorld, model_file: Path
) -> None:
    world = await make_world(StandIn("a"), tokenizers={MODEL: str(model_file)})
    answer = await world.post("/v1/completions", {"model": MODEL, "prompt": "abc" * 20})
    assert answer.headers["x-warmroute-prompt-blocks"] == str(60 // 16)
    assert world.workers[0].tokenize_calls == 1
    assert world.router.reader.counts["local"] == 0


async def test_a_long_prompt_is_tokenised_off_the_loop_with_the_same_result(
    make_world: MakeWorld, model_file: Path, tokenizer: Tokenizer
) -> None:
    worker = StandIn("a", max_length=10**6)
    worker.fingerprint = tokenizer.fingerprint
    world = await make_world(worker, tokenizers={MODEL: str(model_file)})
    text = "It was the best of times, it was the worst of times. " * 400
    await world.post("/v1/completions", {"model": MODEL, "prompt": text})
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert json.loads(worker.received[0].body)["prompt_token_ids"] == ids


async def test_a_worker_whose_tokenize_is_missing_leaves_the_prompt_unhashed_and_counted(
    make_world: MakeWorld,
) -> None:
    worker = StandIn("a", features=())
    worker.behaviour_of_tokenize = 404
    world = await make_world(worker)
    body = b'{"model":"stand-in","prompt":"hello"}'
    answer = await world.post("/v1/completions", body)
    assert answer.status == 200
    assert "answered 404" in answer.headers["x-warmroute-reason"]
    assert worker.received[0].body == body
    assert world.router.reader.failures == {"worker_tokenize": 1}


async def test_a_cache_salt_separates_equal_prompts(make_world: MakeWorld) -> None:
    world = await make_world(StandIn("a"))
    prompt = {"model": MODEL, "prompt": "s" * 160}
    await world.post("/v1/completions", prompt)
    await world.indexed()
    same = await world.post("/v1/completions", prompt)
    salted = await world.post("/v1/completions", {**prompt, "cache_salt": "tenant-2"})
    assert same.headers["x-warmroute-overlap-blocks"] == "10"
    assert salted.headers["x-warmroute-overlap-blocks"] == "0"
