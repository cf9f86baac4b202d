"""Models and tokenizers, each loaded once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer
from worker.models import Model

from .world import EngineWorld, tiny_model

MakeEngine = Callable[..., EngineWorld]


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
