"""POST /v1/chat/completions and /v1/completions: decide, forward, try another worker while nothing has been
sent, stream back.
"""

import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from router.errors import no_worker
from router.http import headers as names
from router.load import Reservation
from router.placement import Decision
from router.prompt import PromptTokens
from router.proxy import MidStreamFailure, Upstream, UpstreamFailed, open_upstream
from router.request import RoutedRequest, read_request
from router.service import Router
from router.splice import with_token_ids
from serving import sse
from serving.http import printable
from serving.openai import OpenAIError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def handler(router: Router, path: str) -> Handler:
    """The handler of one generation endpoint, forwarded to the same path of a worker."""

    async def generate(request: web.Request) -> web.StreamResponse:
        return await Generation(router, request, path).run()

    return generate


class Generation:
    """One client request: reads it once, then makes attempts until one begins to answer."""

    def __init__(self, router: Router, request: web.Request, path: str) -> None:
        self.router, self.request, self.path = router, request, path
        self.started = time.perf_counter()
        self.request_id = printable(request.headers.get(names.REQUEST_ID, "")) or uuid.uuid4().hex
        self.force = request.headers.get(names.WORKER)
        self.failed: dict[str, UpstreamFailed] = {}

    async def run(self) -> web.StreamResponse:
        """Answer the client.  Raises OpenAIError when no worker began to."""
        body = await self.request.read()
        routed = read_request(body)
        with self.router.in_flight.request():
            tokens = await self.router.tokens_of(routed)
            while True:
                response = await self._attempt(routed, tokens, body)
                if response is not None:
                    return response

    async def _attempt(self, routed: RoutedRequest, tokens: PromptTokens, body: bytes) -> web.StreamResponse | None:
        """One worker: its answer relayed, or None when it failed before the first byte and another may be
        tried.
        """
        router = self.router
        decision = router.decide(
            routed,
            tokens,
            session=self.request.headers.get(names.SESSION),
            force=self.force,
            without=tuple(self.failed),
        )
        reservation = router.placer.book(routed.model, decision)
        worker = decision.candidate.worker
        receipt = router.receipts.add(
            self.request_id, routed.model, decision, attempt=len(self.failed) + 1, now=time.time()
        )
        try:
            upstream = await self._open(decision, routed, tokens, body)
        except UpstreamFailed as failure:
            router.fleet.failed(worker)
            router.metrics.retries.labels(failure.kind).inc()
            self.failed[worker] = failure
            receipt.failure = f"{failure.kind}: {failure.detail}"
            self._give_up_or_continue()
            return None
        else:
            try:
                router.fleet.answered(worker)
                return await self._relay(upstream, decision, reservation)
            finally:
                upstream.close()
                receipt.status, receipt.cached_tokens = upstream.status, upstream.cached_tokens
                router.metrics.delivered(decision, upstream.cached_tokens)
        finally:
            reservation.end()

    def _give_up_or_continue(self) -> None:
        """Raise the client's error when no other worker may be tried."""
        if self.force is not None or len(self.failed) > self.router.config.max_retries:
            told = "; ".join(f"{worker} {failure.detail}" for worker, failure in self.failed.items())
            raise no_worker(told, 1)

    async def _open(self, decision: Decision, routed: RoutedRequest, tokens: PromptTokens, body: bytes) -> Upstream:
        view = decision.target.view
        added = {names.REQUEST_ID: self.request_id}
        if len(view.sources) > 1:
            added[names.RANK] = str(decision.target.dp_rank)
        if "prompt_token_ids" in view.beat.features and tokens.ids is not None and not tokens.given:
            body = with_token_ids(body, tokens.ids.tolist())
        return await open_upstream(
            self.router.session,
            view.beat.address + self.path,
            headers=self.request.headers,
            added=added,
            body=body,
            timeouts=self.router.timeouts,
        )

    async def _relay(self, upstream: Upstream, decision: Decision, reservation: Reservation) -> web.StreamResponse:
        """Send the answer on as it comes; every write waits until the client's buffer has room."""
        response = web.StreamResponse(status=upstream.status, headers=upstream.headers())
        response.headers.update(names.of_decision(decision))
        response.headers[names.REQUEST_ID] = self.request_id
        reservation.first_byte()
        metrics = self.router.metrics
        metrics.answered(decision, upstream.status, time.perf_counter() - self.started)
        try:
            await response.prepare(self.request)
            async for chunk in upstream.chunks():
                await response.write(chunk)
            await response.write_eof()
        except MidStreamFailure as failure:
            metrics.upstream_errors.labels("midstream").inc()
            await self._end_broken(response, upstream, failure)
        except ConnectionError:
            self.router.in_flight.cancelled += 1
        return response

    async def _end_broken(self, response: web.StreamResponse, upstream: Upstream, failure: MidStreamFailure) -> None:
        """Tell the client that the answer stays incomplete: an error event in a stream, a cut connection
        elsewhere.
        """
        if not upstream.is_event_stream or "Content-Length" in response.headers:
            if self.request.transport is not None:
                self.request.transport.abort()
            return
        error = OpenAIError(
            502,
            f"The answer broke off: {failure}.",
            type="upstream_error",
            code="worker_lost",
            param=None,
        )
        await response.write(b"\n\n" + sse.event(error.body()))
        await response.write_eof()
