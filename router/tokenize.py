"""From a request to token ids: a local tokenizer, the worker's own /tokenize, or neither, and then it says
so.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvevents.consumer import WorkerView
from router.prompt import PromptTokens
from router.request import RoutedRequest
from serving.logs import get_logger
from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer

log = get_logger(__name__)

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenised on a thread, so that the event loop never waits for one."""
_BYTES_PER_TOKEN = 4
"""Rough size of a token, for the load of prompts that cannot be tokenised."""
_REMOTE_TIMEOUT_S = 5.0


class PromptReader:
    """Tokenises requests.  `counts` is by source: local, worker, given, none; `failures` by reason."""

    def __init__(self, specs: Mapping[str, str], session: aiohttp.ClientSession) -> None:
        self._specs = dict(specs)
        self._session = session
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._local: dict[str, Tokenizer] = {}
        self._refused: set[tuple[str, str]] = set()
        self.counts = {"local": 0, "worker": 0, "given": 0, "none": 0}
        self.failures: dict[str, int] = {}

    async def load(self) -> None:
        """Load every configured tokenizer on a thread.

        Raises what `load_tokenizer` raises, before any request is taken.
        """
        loop = asyncio.get_running_loop()
        for model, spec in self._specs.items():
            self._local[model] = await loop.run_in_executor(self._threads, _load, spec)
            log.info("router.tokenizer", model=model, fingerprint=self._local[model].fingerprint)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, request: RoutedRequest, workers: Sequence[WorkerView]) -> PromptTokens:
        """The request's tokens.  Never raises for a prompt that cannot be tokenised: the result says why."""
        tokens = await self._read(request, workers)
        tokens.salt = request.cache_salt
        return tokens

    async def _read(self, request: RoutedRequest, workers: Sequence[WorkerView]) -> PromptTokens:
        if request.token_ids is not None:
            self.counts["given"] += 1
            return PromptTokens.of(request.token_ids, given=True)
        if request.why_unhashable is not None:
            return self._none(request, "not_text", request.why_unhashable)
        tokenizer = self._tokenizer_for(request.model, workers)
        if tokenizer is not None:
            try:
                ids = await self._encode(tokenizer, request)
            except Exception as error:  # noqa: BLE001 - a template may raise anything; the worker judges the request
                return self._none(request, "template", f"the chat template failed: {error}")
            self.counts["local"] += 1
            return PromptTokens.of(ids)
        return await self._ask_worker(request, workers)

    def _tokenizer_for(self, model: str, workers: Sequence[WorkerView]) -> Tokenizer | None:
        """The local tokenizer, unless a worker's fingerprint says that its own is another one."""
        tokenizer = self._local.get(model)
        if tokenizer is None:
            return None
        for view in workers:
            theirs = view.beat.tokenizer
            if theirs and theirs != tokenizer.fingerprint:
                if (model, theirs) not in self._refused:
                    self._refused.add((model, theirs))
                    log.warning(
                        "router.tokenizer_mismatch",
                        model=model,
                        worker=view.beat.worker,
                        theirs=theirs,
                        ours=tokenizer.fingerprint,
                        remedy="using the worker's /tokenize",
                    )
                return None
        return tokenizer

    async def _encode(self, tokenizer: Tokenizer, request: RoutedRequest) -> list[int]:
        if request.size <= _INLINE_CHARACTERS:
            return _encode(tokenizer, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _encode, tokenizer, request)

    async def _ask_worker(self, request: RoutedRequest, workers: Sequence[WorkerView]) -> PromptTokens:
        """One try at up to two workers; their answer is exact by definition."""
        body = msgspec.json.encode(request.tokenize_body())
        why = "no ready worker to ask"
        for view in workers[:2]:
            try:
                async with self._session.post(
                    f"{view.beat.address}/tokenize",
                    data=body,
                    headers={"Content-Type": "application/json"},
                    timeout=aiohttp.ClientTimeout(total=_REMOTE_TIMEOUT_S),
                ) as response:
                    answer = await response.read()
                if response.status == 200:
                    ids = msgspec.json.decode(answer, type=_Tokenized).tokens
                    self.counts["worker"] += 1
                    return PromptTokens.of(ids)
                why = f"/tokenize of {view.beat.worker} answered {response.status}"
            except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, OSError) as error:
                why = f"/tokenize of {view.beat.worker} failed: {type(error).__name__}"
        return self._none(request, "worker_tokenize", why)

    def _none(self, request: RoutedRequest, reason: str, told: str) -> PromptTokens:
        self.counts["none"] += 1
        self.failures[reason] = self.failures.get(reason, 0) + 1
        return PromptTokens.unknown(max(1, request.size // _BYTES_PER_TOKEN), told)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _load(spec: str) -> Tokenizer:
    path = Path(spec)
    return load_tokenizer(path if path.exists() else resolve_model(spec))


def _encode(tokenizer: Tokenizer, request: RoutedRequest) -> list[int]:
    if request.messages is not None:
        more: dict[str, Any] = dict(request.template_arguments)
        return tokenizer.encode_chat(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            **more,
        )
    assert request.text is not None
    return tokenizer.encode(request.text, add_special_tokens=request.add_special_tokens)
