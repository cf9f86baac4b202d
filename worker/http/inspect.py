"""GET /v1/models, /health, /live, /ready; POST /tokenize, /detokenize."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from serving.openai import OpenAIError, decode_detokenize, decode_tokenize
from serving.openai.responses import Detokenized, ModelCard, ModelList, Tokenized
from worker.service import Worker


class Inspection:
    """Handlers that generate nothing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def models(self, _request: web.Request) -> web.Response:
        """The one served model."""
        return _json(ModelList([self._card()]))

    async def model(self, request: web.Request) -> web.Response:
        """The served model by name, or 404."""
        self._worker.check_model(request.match_info["name"])
        return _json(self._card())

    async def tokenize(self, request: web.Request) -> web.Response:
        """Tokens of a text or of messages, as a generation would see them."""
        worker, fields = self._worker, decode_tokenize(await request.read())
        if fields.model is not None:
            worker.check_model(fields.model)
        if fields.prompt is not None:
            tokens = await worker.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        else:
            tokens = await worker.encode_chat(
                fields.messages or [],
                tools=fields.tools,
                add_generation_prompt=fields.add_generation_prompt,
                template_arguments=fields.chat_template_kwargs,
            )
        return _json(Tokenized(tokens, len(tokens), worker.max_length))

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of tokens."""
        worker, fields = self._worker, decode_detokenize(await request.read())
        if fields.model is not None:
            worker.check_model(fields.model)
        if fields.tokens:
            worker.check_tokens(fields.tokens, "tokens")
        text = worker.tokenizer.decode(fields.tokens, skip_special_tokens=bool(fields.skip_special_tokens))
        return _json(Detokenized(text))

    async def live(self, _request: web.Request) -> web.Response:
        """200 while event loop and engine run: a restart would help against nothing else."""
        if not self._worker.engine.is_alive:
            raise OpenAIError(503, "The engine's thread has ended.", type="internal_error", code="engine_dead")
        return _json({"status": "live"})

    async def ready(self, _request: web.Request) -> web.Response:
        """200 while new requests are taken."""
        worker = self._worker
        is_ready = worker.state == "ready" and worker.engine.is_alive
        return _json({"ready": is_ready, "state": worker.state}, status=200 if is_ready else 503)

    async def health(self, _request: web.Request) -> web.Response:
        """State and load; 503 when the engine is out of order."""
        worker, engine = self._worker, self._worker.engine
        load = engine.load
        body = {
            "status": "ok" if engine.is_alive else "failed",
            "worker": worker.id,
            "model": worker.model,
            "state": worker.state,
            "bus_connected": worker.bus_connected,
            "running": load.running,
            "waiting": engine.waiting,
            "blocks": {"held": load.used_blocks, "cached": load.cached_blocks, "total": load.total_blocks},
            "busy_for_s": round(engine.busy_for_s, 3),
            "max_model_len": worker.max_length,
        }
        return _json(body, status=200 if engine.is_alive else 503)

    def _card(self) -> ModelCard:
        return ModelCard(self._worker.model, self._worker.created, self._worker.max_length)


def _json(payload: Any, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(payload), content_type="application/json")
