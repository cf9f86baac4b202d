"""From a request's fields to what the engine takes, with the checks that need the model."""

from __future__ import annotations

import secrets

from serving.openai import OpenAIError, SamplingFields
from worker.engine import GenerationRequest, Limits
from worker.sampling import SamplingSettings, derived_seed
from worker.service import Worker

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may go on to the longest sequence."""


def generation_requests(
    worker: Worker, fields: SamplingFields, prompts: list[list[int]], *, logprobs: int | None, is_chat: bool
) -> list[GenerationRequest]:
    """`n` generations for each prompt, prompt by prompt.  Raises OpenAIError 400."""
    seed = fields.seed if fields.seed is not None else secrets.randbits(64)
    _check_tokens(worker, fields)
    limits = [_limits(worker, fields, len(prompt), is_chat=is_chat) for prompt in prompts]
    return [
        GenerationRequest(
            prompt,
            limit,
            _settings(fields, derived_seed(seed, choice), logprobs),
            skip_special_tokens=fields.skip_special_tokens is not False,
            # The context names blocks by tokens alone; what is salted must not be shared.
            cacheable=not fields.cache_salt,
        )
        for prompt, limit in zip(prompts, limits, strict=True)
        for choice in range(fields.n or 1)
    ]


def _check_tokens(worker: Worker, fields: SamplingFields) -> None:
    for name, tokens in (("stop_token_ids", fields.stop_token_ids), ("logit_bias", list(fields.logit_bias or ()))):
        if tokens:
            worker.check_tokens(tokens, name)


def _limits(worker: Worker, fields: SamplingFields, prompt: int, *, is_chat: bool) -> Limits:
    longest = worker.max_length
    wanted = getattr(fields, "max_completion_tokens", None) or fields.max_tokens
    if wanted is None:
        wanted = longest - prompt if is_chat else min(_COMPLETION_TOKENS, longest - prompt)
        wanted = max(wanted, 1)
    if prompt + wanted > longest:
        raise OpenAIError(
            400,
            f"The prompt has {prompt} tokens, and with max_tokens {wanted} that exceeds the {longest} tokens of the "
            "longest sequence; shorten the prompt or lower max_tokens.",
            code="context_length_exceeded",
            param="messages" if is_chat else "prompt",
        )
    ends = set() if fields.ignore_eos else set(worker.tokenizer.eos_token_ids)
    return Limits(
        max_tokens=wanted,
        min_tokens=fields.min_tokens or 0,
        token_ids=frozenset(ends | set(fields.stop_token_ids or ())),
        strings=tuple(fields.stop_strings),
        include_stop=bool(fields.include_stop_str_in_output),
    )


def _settings(fields: SamplingFields, seed: int, logprobs: int | None) -> SamplingSettings:
    def value(given: float | None, default: float) -> float:
        return default if given is None else given

    return SamplingSettings(
        temperature=value(fields.temperature, 1.0),
        top_k=max(fields.top_k or 0, 0),
        top_p=value(fields.top_p, 1.0),
        min_p=value(fields.min_p, 0.0),
        repetition_penalty=value(fields.repetition_penalty, 1.0),
        presence_penalty=value(fields.presence_penalty, 0.0),
        frequency_penalty=value(fields.frequency_penalty, 0.0),
        logit_bias=tuple((fields.logit_bias or {}).items()),
        seed=seed,
        logprobs=logprobs,
    )
