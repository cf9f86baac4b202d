"""What the router knows and would do: POST /v1/route, GET /v1/models, /v1/workers, /v1/sources,
/debug/workers.
"""

from typing import Any

import msgspec
from aiohttp import web

from kvevents.consumer import SourceView, WorkerView
from router.errors import unknown_decision, unknown_worker
from router.http import headers as names
from router.index.catalog import IndexKey
from router.placement import Decision
from router.request import read_request
from router.service import Router


def _json(payload: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(payload), content_type="application/json")


def describe_decision(decision: Decision) -> dict[str, Any]:
    """A decision with every candidate, as /v1/route answers it."""
    size = decision.prompt.block_size
    candidates = []
    for target, candidate, score in zip(decision.targets, decision.candidates, decision.choice.scores, strict=True):
        source = target.view.sources[target.dp_rank]
        candidates.append(
            {
                "worker": candidate.worker,
                "dp_rank": candidate.dp_rank,
                "address": target.view.beat.address,
                "overlap_blocks": candidate.overlap_blocks,
                "expected_blocks": candidate.expected_blocks,
                "cached_tokens": candidate.overlap_blocks * target.view.beat.block_size,
                "load": {
                    "prefill_tokens": candidate.queued_tokens,
                    "decode_blocks": candidate.decode_blocks,
                    "requests": candidate.running,
                    "recent_tokens": round(candidate.recent_tokens, 1),
                },
                "score": score,
                "state": target.view.beat.state,
                "trust": source.trust,
            }
        )
    return {
        "worker": decision.candidate.worker,
        "dp_rank": decision.candidate.dp_rank,
        "reason": names.reason(decision),
        "kind": decision.choice.kind,
        "prompt_tokens": decision.prompt.tokens,
        "prompt_blocks": decision.prompt.blocks,
        "block_size": size,
        "hashed": decision.prompt.hashed,
        "candidates": candidates,
    }


class Inspection:
    """Read-only handlers over one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def route(self, request: web.Request) -> web.Response:
        """The decision for a body, without sending or booking anything."""
        routed = read_request(await request.read())
        tokens = await self._router.tokens_of(routed)
        decision = self._router.decide(
            routed,
            tokens,
            session=request.headers.get(names.SESSION),
            force=request.headers.get(names.WORKER),
        )
        response = _json(describe_decision(decision))
        response.headers.update(names.of_decision(decision))
        return response

    async def prefix(self, request: web.Request) -> web.Response:
        """Who holds this prompt, and how deep: every worker of the model, ready or not."""
        router = self._router
        routed = read_request(await request.read())
        tokens = await router.tokens_of(routed)
        rows = []
        for target in router.fleet.targets(router.fleet.of_model(routed.model)):
            size = target.view.beat.block_size
            held = router.catalog.match(IndexKey(routed.model, size), tokens.hashes(size)).as_dict()
            blocks = held.get(target.handle, 0)
            rows.append(
                {
                    "worker": target.key.worker,
                    "dp_rank": target.dp_rank,
                    "overlap_blocks": blocks,
                    "prompt_blocks": tokens.count // size,
                    "cached_tokens": blocks * size,
                    "trust": target.view.sources[target.dp_rank].trust,
                }
            )
        return _json({"prompt_tokens": tokens.count, "unhashed": tokens.why_not, "holders": rows})

    async def decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest first; `?n=` says how many (50)."""
        asked = request.query.get("n", "50")
        count = int(asked) if asked.isdecimal() else 50
        return _json({"decisions": [receipt.describe() for receipt in self._router.receipts.last(count)]})

    async def decision(self, request: web.Request) -> web.Response:
        """The decision of one request, by its x-request-id."""
        receipt = self._router.receipts.get(request.match_info["id"])
        if receipt is None:
            raise unknown_decision(request.match_info["id"], self._router.config.receipts)
        return _json(receipt.describe())

    async def drain(self, request: web.Request) -> web.Response:
        """Give a worker no new prompts (POST), or let it take them again (DELETE); running ones go on."""
        worker, fleet = request.match_info["id"], self._router.fleet
        known = fleet.drain(worker) if request.method == "POST" else fleet.undrain(worker)
        if not known:
            raise unknown_worker(worker, fleet.workers(), param="id")
        return _json(self._worker(fleet.workers()[worker]))

    async def models(self, request: web.Request) -> web.Response:
        """OpenAI's list of models: those that a known worker serves."""
        fleet = self._router.fleet
        rows = []
        for model in fleet.models():
            views = fleet.of_model(model)
            rows.append(
                {
                    "id": model,
                    "object": "model",
                    "created": 0,
                    "owned_by": "warmroute",
                    "max_model_len": max(view.beat.max_sequence_length for view in views),
                    "workers": len(views),
                }
            )
        return _json({"object": "list", "data": rows})

    async def workers(self, request: web.Request) -> web.Response:
        """One row a worker: what it says of itself and whether it takes prompts."""
        fleet = self._router.fleet
        return _json({"workers": [self._worker(view) for view in fleet.workers().values()]})

    async def sources(self, request: web.Request) -> web.Response:
        """One row a source: how exactly the index follows it."""
        rows = []
        for view in self._router.fleet.workers().values():
            rows += [
                {"worker": view.beat.worker, "dp_rank": rank, **self._source(source)}
                for rank, source in view.sources.items()
            ]
        return _json({"sources": rows})

    def _worker(self, view: WorkerView) -> dict[str, Any]:
        beat = view.beat
        why_not = self._router.fleet.why_not(view)
        return {
            "worker": beat.worker,
            "model": beat.model,
            "address": beat.address,
            "state": beat.state,
            "alive": view.alive,
            "takes_prompts": why_not is None,
            "why_not": why_not,
            "block_size": beat.block_size,
            "capacity_blocks": beat.capacity_blocks,
            "max_sequence_length": beat.max_sequence_length,
            "tokenizer": beat.tokenizer,
            "features": beat.features,
            "sources": {str(rank): self._source(source) for rank, source in view.sources.items()},
            "load": [
                {
                    "dp_rank": target.dp_rank,
                    "prefill_tokens": account.queued_tokens,
                    "decode_blocks": account.pinned_blocks,
                    "requests": account.running,
                    "promised_by_this_router": account.requests,
                }
                for target in self._router.fleet.targets([view])
                for account in [self._router.ledger.account(target.key)]
            ],
        }

    def _source(self, source: SourceView) -> dict[str, Any]:
        counters = source.counters
        return {
            "state": source.state,
            "reason": source.reason,
            "trust": source.trust,
            "epoch": source.epoch,
            "seq": source.seq,
            "blocks": source.blocks,
            "indexed_blocks": self._router.catalog.blocks_of(source.handle),
            "digest": source.digest,
            "gaps": source.gaps,
            "repairs": source.repairs,
            "snapshots": counters.snapshots,
            "restarts": counters.restarts,
            "messages_applied": counters.applied,
            "messages_rejected": dict(counters.rejected),
        }
