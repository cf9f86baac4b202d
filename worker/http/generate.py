"""POST /v1/chat/completions and /v1/completions: checks, generation, and the answer whole or as a stream."""

from __future__ import annotations

import logging
import time
import uuid
from typing import NamedTuple

from aiohttp import web
from msgspec import UNSET

from serving import sse
from serving.http import REQUEST_ID, printable
from serving.openai import OpenAIError, SamplingFields, decode_chat, decode_completion, prompts
from serving.openai.responses import Usage, usage
from worker.engine import (
    EngineStoppedError,
    FinishReason,
    GenerationRequest,
    Output,
    OutputStream,
    QueueFullError,
)
from worker.http.formats import AnswerFormat, ChatFormat, ChunkUsage, CompletionFormat, is_shown
from worker.http.parameters import generation_requests
from worker.service import Worker, unavailable

log = logging.getLogger(__name__)

WORKER = "x-warmroute-worker"


class Job(NamedTuple):
    """A request that was checked, ready to run."""

    route: str
    request_id: str
    fields: SamplingFields
    requests: list[GenerationRequest]
    """Choices of the first prompt, then of the second, ..."""
    format: AnswerFormat
    has_logprobs: bool


class Generate:
    """The two handlers."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._handle(request, "chat")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._handle(request, "completion")

    async def _handle(self, request: web.Request, route: str) -> web.StreamResponse:
        worker, status = self._worker, 499
        try:
            with worker.request():
                body = await request.read()
                request_id = printable(request.headers.get(REQUEST_ID) or uuid.uuid4().hex)
                job = await (self._chat_job if route == "chat" else self._completion_job)(body, request_id)
                response = await Answer(worker, request, job).run()
                status = response.status
                return response
        except OpenAIError as error:
            status = error.status
            error.headers.setdefault(WORKER, worker.id)
            raise
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            worker.metrics.answered(route, status)

    async def _chat_job(self, body: bytes, request_id: str) -> Job:
        worker, fields = self._worker, decode_chat(body)
        worker.check_model(fields.model)
        if fields.prompt_token_ids is not None:
            tokens = fields.prompt_token_ids
            worker.check_tokens(tokens, "prompt_token_ids")
        else:
            tokens = await worker.encode_chat(
                fields.messages,
                tools=fields.tools if fields.tool_choice != "none" else None,
                add_generation_prompt=fields.add_generation_prompt,
                template_arguments=fields.chat_template_kwargs,
            )
        if not tokens:
            raise OpenAIError(400, "The messages give an empty prompt.", param="messages")
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        requests = generation_requests(worker, fields, [tokens], logprobs=logprobs, is_chat=True)
        answer = ChatFormat(worker.model, worker.tokenizer, logprobs=bool(fields.logprobs))
        return Job("chat", request_id, fields, requests, answer, logprobs is not None)

    async def _completion_job(self, body: bytes, request_id: str) -> Job:
        worker, fields = self._worker, decode_completion(body)
        worker.check_model(fields.model)
        given = prompts(fields)
        tokens = [await self._prompt_tokens(prompt, place, fields) for place, prompt in enumerate(given)]
        requests = generation_requests(worker, fields, tokens, logprobs=fields.logprobs, is_chat=False)
        echoes = None
        if fields.echo:
            texts = [p if isinstance(p, str) else worker.tokenizer.decode(p) for p in given]
            echoes = [text for text in texts for _ in range(fields.n or 1)]
        answer = CompletionFormat(worker.model, worker.tokenizer, logprobs=fields.logprobs, echoes=echoes)
        return Job("completion", request_id, fields, requests, answer, fields.logprobs is not None)

    async def _prompt_tokens(self, prompt: str | list[int], place: int, fields: SamplingFields) -> list[int]:
        if isinstance(prompt, str):
            tokens = await self._worker.encode(prompt, add_special_tokens=fields.add_special_tokens is not False)
            if not tokens:
                raise OpenAIError(400, f"prompt {place} is empty; send at least one token.", param="prompt")
            return tokens
        self._worker.check_tokens(prompt, "prompt" if fields.prompt_token_ids is None else "prompt_token_ids")
        return prompt


class Answer:
    """Runs one job: submits, collects, writes; cancels what still runs when the client goes away."""

    def __init__(self, worker: Worker, request: web.Request, job: Job) -> None:
        self._worker, self._request, self._job = worker, request, job
        self._started = time.perf_counter()
        self._last_output = self._started
        self._outputs = [Output() for _ in job.requests]
        """Everything so far, by choice."""

    async def run(self) -> web.StreamResponse:
        """The whole answer.  Raises OpenAIError while nothing has been sent."""
        stream = self._submit()
        try:
            respond = self._stream if self._job.fields.stream else self._whole
            response = await respond(stream)
        except BaseException:
            if not stream.is_finished:
                self._worker.metrics.disconnects.inc()
            raise
        finally:
            stream.close()
        self._observe_end()
        return response

    def _submit(self) -> OutputStream:
        try:
            return self._worker.engine.submit(self._job.requests)
        except QueueFullError as error:
            raise unavailable(f"Worker {self._worker.id} is full: {error}.", "queue_full") from error
        except EngineStoppedError as error:
            raise unavailable(f"Worker {self._worker.id} stops.", "worker_stopped") from error

    async def _next(self, stream: OutputStream) -> list[tuple[int, Output]]:
        """The next outputs, noted; raises OpenAIError when the engine gave the request up."""
        arrived = await stream.next()
        now = time.perf_counter()
        metrics = self._worker.metrics
        if self._last_output == self._started:
            metrics.first_token.observe(now - self._started)
        else:
            metrics.inter_token.observe(now - self._last_output)
        self._last_output = now
        for choice, output in arrived:
            self._outputs[choice].extend(output)
            if output.queued_s is not None:
                metrics.queued.observe(output.queued_s)
            if output.finish is FinishReason.ERROR:
                raise OpenAIError(500, f"The engine failed: {output.error}.", type="internal_error", code="engine")
            if output.finish is FinishReason.ABORT:
                raise unavailable(f"Worker {self._worker.id} stops.", "worker_stopped")
        return arrived

    async def _whole(self, stream: OutputStream) -> web.Response:
        while not stream.is_finished:
            await self._next(stream)
        body = self._job.format.whole(self._outputs, self._usage())
        return web.Response(body=body, content_type="application/json", headers=self._headers())

    async def _stream(self, stream: OutputStream) -> web.StreamResponse:
        arrived = await self._next(stream)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **self._headers(),
            }
        )
        await response.prepare(self._request)
        opened: set[int] = set()
        try:
            while True:
                await response.write(self._events(arrived, opened))
                if stream.is_finished:
                    break
                arrived = await self._next(stream)
        except OpenAIError as error:
            # The status has left already; an error event is what remains.
            await response.write(sse.event(error.body()))
        else:
            last = sse.event(self._job.format.usage_chunk(self._usage())) if self._job.fields.includes_usage else b""
            await response.write(last + sse.DONE)
        await response.write_eof()
        return response

    def _events(self, arrived: list[tuple[int, Output]], opened: set[int]) -> bytes:
        answer, events = self._job.format, []
        usage_so_far = self._chunk_usage()
        for choice, output in arrived:
            if choice not in opened:
                opened.add(choice)
                opening = answer.opening(choice, usage_so_far)
                if opening is not None:
                    events.append(sse.event(opening))
            if is_shown(output, has_logprobs=self._job.has_logprobs):
                events.append(sse.event(answer.chunk(choice, output, usage_so_far)))
        return b"".join(events)

    def _chunk_usage(self) -> ChunkUsage:
        if self._job.fields.has_continuous_usage:
            return self._usage()
        return None if self._job.fields.includes_usage else UNSET

    def _usage(self) -> Usage:
        """A prompt counts once however many choices it has, and so do its cached tokens: the first choice's."""
        choices = self._job.fields.n or 1
        firsts = range(0, len(self._job.requests), choices)
        return usage(
            sum(len(self._job.requests[first].prompt) for first in firsts),
            sum(len(output.tokens) for output in self._outputs),
            sum(self._outputs[first].cached_tokens for first in firsts),
        )

    def _headers(self) -> dict[str, str]:
        return {WORKER: self._worker.id, REQUEST_ID: self._job.request_id}

    def _observe_end(self) -> None:
        seconds = time.perf_counter() - self._started
        told, metrics = self._usage(), self._worker.metrics
        metrics.whole.observe(seconds)
        metrics.prompt_tokens.observe(told.prompt_tokens)
        metrics.generated_tokens.observe(told.completion_tokens)
        log.info(
            "request.done",
            extra={
                "request_id": self._job.request_id,
                "route": self._job.route,
                "prompt_tokens": told.prompt_tokens,
                "cached_tokens": told.prompt_tokens_details.cached_tokens,
                "completion_tokens": told.completion_tokens,
                "ms": round(seconds * 1000, 1),
            },
        )
