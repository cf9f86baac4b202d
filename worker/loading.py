"""From settings to an engine that has produced its first token: model, tokenizer, context, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from context import (
    DynamicInferenceContext,
    InferenceConfig,
    PrefixCachingEvictionPolicy,
)
from serving.model_files import resolve_model, served_name
from serving.tokenizer import Tokenizer, load_tokenizer
from worker.config import WorkerConfig
from worker.engine.core import EngineCore
from worker.engine.request import GenerationRequest, Limits, Output
from worker.models import Model, load_model
from worker.sampling import SamplingSettings

Progress = Callable[[str, float], None]
"""Told what is being done, and which fraction of all is done."""

_LOADED = 0.9
"""Where in the whole the model is loaded; the rest is cache and warm-up."""
_WARM_UP_TOKENS = 48


class StartupError(ValueError):
    """Settings and model that do not fit together; the message names both and the remedy."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker serves."""

    name: str
    """The model's name for clients."""
    model: Model
    tokenizer: Tokenizer
    context: DynamicInferenceContext


def load(config: WorkerConfig, progress: Progress) -> Loaded:
    """Load everything that `config` names; blocks for seconds.

    Raises StartupError, or what the loaders raise, each a ValueError with its remedy.
    """
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    path = resolve_model(config.model)
    model = load_model(
        path,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        progress=lambda what, fraction: progress(what, fraction * _LOADED),
    )
    progress("reading the tokenizer", _LOADED)
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > model.config.vocab:
        raise StartupError(
            f"{path}: the tokenizer knows {tokenizer.vocab_size} tokens and the model {model.config.vocab}; "
            "they do not belong together"
        )
    progress("allocating the cache", _LOADED)
    return Loaded(config.served_name or served_name(config.model), model, tokenizer, build_context(config, model))


def build_context(config: WorkerConfig, model: Model) -> DynamicInferenceContext:
    """The inference context of a worker.  Raises StartupError for a sequence length beyond the model's."""
    longest = config.max_sequence_length or model.config.max_position
    if longest > model.config.max_position:
        raise StartupError(
            f"max_sequence_length is {longest}, and the model was made for {model.config.max_position}; lower it"
        )
    return DynamicInferenceContext(
        model.transformer_config(),
        InferenceConfig(
            max_sequence_length=longest,
            buffer_size_gb=config.cache_gb,
            paused_buffer_size_gb=config.paused_cache_gb,
            block_size_tokens=config.block_size_tokens,
            max_requests=config.max_requests,
            max_tokens=config.max_tokens,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy(config.prefix_caching_eviction_policy),
            enable_chunked_prefill=True,
            hash_generated_blocks=config.advertise_generated_blocks,
            device=config.device,
        ),
    )


def warm_up(loaded: Loaded) -> float:
    """Run one short generation, so that the first client does not pay for first-time work; the seconds it took.

    Leaves an empty context, and must come before any listener hears of events.  Raises StartupError.
    """
    began = time.perf_counter()
    core = EngineCore(loaded.model, loaded.context, loaded.tokenizer)
    length = max(1, min(_WARM_UP_TOKENS, core.max_length - 2))
    prompt = [token % loaded.model.config.vocab for token in range(length)]
    outputs: list[Output] = []
    request = GenerationRequest(prompt, Limits(max_tokens=2), SamplingSettings(temperature=0.0))
    core.add(core.prepare(request, outputs.append))
    while core.has_work:
        core.step()
    if outputs[-1].error is not None:
        raise StartupError(f"the model failed its first tokens: {outputs[-1].error}")
    loaded.context.reset()
    return time.perf_counter() - began
