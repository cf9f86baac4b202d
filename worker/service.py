"""One worker as its HTTP handlers see it: what it serves, whether it takes requests, how many are under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from serving.metrics import new_registry
from serving.openai import OpenAIError
from serving.tokenizer import ChatTemplateError, Tokenizer
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.metrics import EngineCollector, RequestMetrics

_INLINE_CHARACTERS = 4096
"""Longer texts are tokenised on a thread, so that streams of others do not wait for them."""
_RETRY_AFTER_S = "1"


class Worker:
    """Belongs to the event loop.  `state` is ready, draining or stopped, as heartbeats tell it."""

    def __init__(self, config: WorkerConfig, model: str, tokenizer: Tokenizer, engine: Engine, vocabulary: int) -> None:
        self.config = config
        self.id = config.worker_id
        self.model = model
        self.tokenizer = tokenizer
        self.engine = engine
        self.vocabulary = vocabulary
        """Token ids must be below this."""
        self.created = int(time.time())
        self.state = "ready"
        self.bus_connected: bool | None = None
        """None without a bus."""
        self.registry: CollectorRegistry = new_registry()
        self.metrics = RequestMetrics(self.registry, model)
        self.registry.register(EngineCollector(engine, model))
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.engine.core.max_length

    @property
    def under_way(self) -> int:
        """Generation requests being answered."""
        return self._under_way

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one generation request.  Raises OpenAIError 503 when the worker takes none."""
        if self.state != "ready" or not self.engine.is_alive:
            why = self.state if self.engine.is_alive else "out of order"
            raise unavailable(f"Worker {self.id} is {why}; ask another one.", f"worker_{why.replace(' ', '_')}")
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is under way; False when that took too long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def check_model(self, name: str) -> None:
        """Raises OpenAIError 404 for another model than the served one."""
        if name != self.model:
            raise OpenAIError(
                404,
                f"The model {name!r} is not served here; served is {self.model!r}.",
                code="model_not_found",
                param="model",
            )

    def check_tokens(self, tokens: list[int], param: str) -> None:
        """Raises OpenAIError 400 for a token that the model does not have."""
        highest = max(tokens)
        if highest >= self.vocabulary:
            raise OpenAIError(
                400,
                f"{param}[{tokens.index(highest)}] is {highest}; the model has the tokens 0 to {self.vocabulary - 1}.",
                param=param,
            )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a text."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool | None,
        template_arguments: dict[str, Any] | None,
    ) -> list[int]:
        """Tokens of messages in the model's chat template.  Raises OpenAIError 400 when it refuses them."""

        def encode() -> list[int]:
            return self.tokenizer.encode_chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt is not False,
                **(template_arguments or {}),
            )

        try:
            if sum(len(str(message.get("content"))) for message in messages) <= _INLINE_CHARACTERS:
                return encode()
            return await asyncio.to_thread(encode)
        except ChatTemplateError as error:
            raise OpenAIError(400, f"{error}.", param="messages", code="chat_template") from error
        except TypeError as error:
            raise OpenAIError(400, f"chat_template_kwargs: {error}.", param="chat_template_kwargs") from error


def unavailable(message: str, code: str) -> OpenAIError:
    """A 503 that says when to try again."""
    return OpenAIError(503, message, type="service_unavailable", code=code, headers={"Retry-After": _RETRY_AFTER_S})
