"""Models and tokenizers, each loaded once."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch

from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer
from worker.config import WorkerConfig
from worker.loading import Loaded, build_context, load
from worker.main import running
from worker.models import Model

from .world import EngineWorld, Served, tiny_model

MakeEngine = Callable[..., EngineWorld]
Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2"))


@pytest.fixture(scope="session")
def tiny(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random model with the vocabulary of a real tokenizer."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer.vocab_size)


@pytest.fixture
def engine(tiny: Model, tokenizer: Tokenizer) -> MakeEngine:
    """Makes engines over the tiny model, or over the model given as `model`."""

    def make(*, model: Any = None, **shape: Any) -> EngineWorld:
        return EngineWorld(model or tiny, tiny, tokenizer, **shape)

    return make


@pytest.fixture
def serve(tiny: Model, tokenizer: Tokenizer) -> Serve:
    """Serves the tiny model over HTTP: `async with serve(max_requests=2) as served`; `model` replaces its forward."""

    @asynccontextmanager
    async def start(*, model: Any = None, **settings: Any) -> AsyncIterator[Served]:
        config = WorkerConfig(
            **({"id": "w", "cache_gb": 0.002, "max_requests": 16, "max_tokens": 64, "debug": True} | settings)
        )
        loaded = Loaded("tiny", model or tiny, tokenizer, build_context(config, tiny))
        async with running(config, loaded) as started, aiohttp.ClientSession() as session:
            yield Served(started, session)
            if started.worker.engine.is_alive:
                assert started.worker.engine.core.counters.integrity_failures == 0
                assert started.worker.engine.core.counters.resets == 0

    return start


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """A worker with the tiny model."""
    async with serve() as worker:
        yield worker


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """The real model, loaded as a worker loads it."""
    return load(WorkerConfig(cache_gb=0.1, threads=1, max_requests=16, max_tokens=256), lambda what, fraction: None)


@pytest.fixture
async def real(smollm2: Loaded) -> AsyncIterator[Served]:
    """A worker with the real model and an empty cache."""
    smollm2.context.reset()
    config = WorkerConfig(id="real", max_requests=16, max_tokens=256)
    async with running(config, smollm2) as started, aiohttp.ClientSession() as session:
        yield Served(started, session)
