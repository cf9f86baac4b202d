"""The built-in proof: one conversation over real HTTP through the router, its follow-up warm and cold.

What is compared is one and the same request, the follow-up turn of a conversation: *warm* on the worker that the
router chooses because it holds the conversation so far, *cold* on another worker, forced by a header, that has never
seen it.  Prompt, length, model, machine and the way through the router are equal; only the cache differs.  Both times
run from sending the request to the first piece of text at the client.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec

from serving.sse import SSEParser
from warmroute.proof_text import FIRST_QUESTION, FOLLOW_UP, SYSTEM

_ANSWER_TOKENS = 48
_LEAST_SPEEDUP = 2.0
"""Below this the cache plainly did not work; a healthy machine shows far more."""
_SETTLE_S = 5.0
_POLL_S = 0.05
_POLLS_UNCHANGED = 6

Say = Callable[[str], None]


class ProofError(Exception):
    """The proof could not be run, or did not hold; the message is the reason."""


class Turn(NamedTuple):
    """One request and what came of it."""

    label: str
    worker: str
    reason: str
    overlap_blocks: int
    prompt_blocks: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    text: str


class Proof(NamedTuple):
    """The three turns and the size of a block in tokens."""

    first: Turn
    warm: Turn
    cold: Turn
    block_size: int

    @property
    def speedup(self) -> float:
        """Time to first token cold over warm."""
        return self.cold.ttft_ms / self.warm.ttft_ms

    def as_dict(self) -> dict[str, Any]:
        """The proof as `--json` prints it; overlap, cached tokens, worker and text are those of the warm turn."""
        return {
            "cold_ttft_ms": round(self.cold.ttft_ms, 1),
            "warm_ttft_ms": round(self.warm.ttft_ms, 1),
            "speedup": round(self.speedup, 1),
            "overlap_blocks": self.warm.overlap_blocks,
            "cached_tokens": self.warm.cached_tokens,
            "worker": self.warm.worker,
            "text": self.warm.text,
        }

    def failures(self) -> list[str]:
        """Why the proof does not hold; empty when it does."""
        found = []
        if self.warm.worker != self.first.worker:
            found.append(f"the follow-up went to {self.warm.worker}, though {self.first.worker} holds the conversation")
        for turn in (self.first, self.warm, self.cold):
            if not turn.text.strip():
                found.append(f"{turn.label}: the answer is empty")
            if turn.cached_tokens not in computable(turn.overlap_blocks, turn.prompt_tokens, self.block_size):
                found.append(
                    f"{turn.label}: the engine took {turn.cached_tokens} tokens from its cache, the router promised "
                    f"{turn.overlap_blocks} blocks of {self.block_size}"
                )
        if self.warm.overlap_blocks == 0:
            found.append("the follow-up overlapped no block")
        if self.speedup < _LEAST_SPEEDUP:
            found.append(f"the warm answer came only {self.speedup:.1f} times sooner, less than {_LEAST_SPEEDUP:g}")
        return found


def computable(overlap_blocks: int, prompt_tokens: int, block_size: int) -> set[int]:
    """The numbers of cached tokens that agree with an overlap.

    All tokens of the overlapping blocks; or, when that would leave fewer than two tokens of the prompt to compute, the
    largest number of whole blocks that leaves two (the engine needs the last position's output, and a prefill of one
    token would look like decoding).
    """
    whole = overlap_blocks * block_size
    if prompt_tokens - whole >= 2:
        return {whole}
    return {whole, max(0, (prompt_tokens - 2) // block_size * block_size)}


async def prove(router: str, say: Say) -> Proof:
    """Hold the conversation through the router at URL `router`; `say` gets one line before each turn.

    Raises `ProofError` when a request fails; whether the figures hold is for `Proof.failures`.
    """
    timeout = aiohttp.ClientTimeout(total=300, sock_connect=5)
    async with aiohttp.ClientSession(base_url=router, timeout=timeout) as session:
        workers, model = await _workers(session)
        if len(workers) < 2:
            raise ProofError(f"the proof compares two workers, and the router knows {len(workers)}; use --workers 2")
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST_QUESTION}]
        say("first question: a long page that no worker has read yet")
        first = await _ask(session, model, messages, "first question")
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": FOLLOW_UP}]
        block_size = await _settled(session, model, messages)
        say(f"follow-up: the router should choose {first.worker}, which holds the conversation")
        warm = await _ask(session, model, messages, "follow-up, warm")
        other = next(worker for worker in workers if worker != warm.worker)
        say(f"the same follow-up again, forced to {other}, which has to read everything")
        cold = await _ask(session, model, messages, "follow-up, cold", force=other)
    return Proof(first, warm, cold, block_size)


async def _workers(session: aiohttp.ClientSession) -> tuple[list[str], str]:
    """The workers that take prompts, and the model of the first."""
    async with session.get("/v1/workers") as response:
        rows = (await response.json())["workers"]
    ready = [row for row in rows if row["takes_prompts"]]
    if not ready:
        raise ProofError("no worker takes prompts")
    model = ready[0]["model"]
    return [row["worker"] for row in ready if row["model"] == model], model


async def _settled(session: aiohttp.ClientSession, model: str, messages: list[dict[str, str]]) -> int:
    """Wait until the router has heard of every block of the first turn, as far as one can tell from outside: the
    best overlap is above zero and has stopped growing.  Returns the size of a block.
    """
    deadline = time.monotonic() + _SETTLE_S
    last, unchanged = 0, 0
    while True:
        async with session.post("/v1/route", json={"model": model, "messages": messages}) as response:
            if response.status != 200:
                raise ProofError(f"/v1/route answered {response.status}: {await _reason(response)}")
            route = await response.json()
        best = max(candidate["overlap_blocks"] for candidate in route["candidates"])
        unchanged = unchanged + 1 if best == last and best > 0 else 0
        if unchanged >= _POLLS_UNCHANGED:
            return int(route["block_size"])
        if time.monotonic() > deadline:
            raise ProofError(f"after {_SETTLE_S:g} s the router still has not heard of the conversation's blocks")
        last = best
        await asyncio.sleep(_POLL_S)


async def _ask(
    session: aiohttp.ClientSession,
    model: str,
    messages: list[dict[str, str]],
    label: str,
    *,
    force: str | None = None,
) -> Turn:
    """Send one chat request, read the stream to its end."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
    }
    headers = {"x-warmroute-worker": force} if force else {}
    data = msgspec.json.encode(body)
    started = time.perf_counter()
    async with session.post(
        "/v1/chat/completions", data=data, headers={"Content-Type": "application/json", **headers}
    ) as response:
        if response.status != 200:
            raise ProofError(f"{label}: the router answered {response.status}: {await _reason(response)}")
        first_at, text, usage = await _read_stream(response, label)
        got = response.headers
    return Turn(
        label=label,
        worker=got["x-warmroute-worker"],
        reason=got["x-warmroute-reason"],
        overlap_blocks=int(got["x-warmroute-overlap-blocks"]),
        prompt_blocks=int(got["x-warmroute-prompt-blocks"]),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_ms=(first_at - started) * 1000,
        text=text,
    )


async def _read_stream(response: aiohttp.ClientResponse, label: str) -> tuple[float, str, dict[str, Any]]:
    """(time of the first piece of text, whole text, usage)."""
    parser, pieces, usage, first_at = SSEParser(), [], None, None
    async for chunk in response.content.iter_any():
        for event in parser.feed(chunk):
            if event.is_done:
                continue
            part = json.loads(event.data)
            if "error" in part:
                raise ProofError(f"{label}: the answer broke off: {part['error'].get('message', part['error'])}")
            usage = part.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in part["choices"])
            if piece and first_at is None:
                first_at = time.perf_counter()
            pieces.append(piece)
    if usage is None:
        raise ProofError(f"{label}: the stream ended without usage")
    if first_at is None:
        raise ProofError(f"{label}: the answer is empty")
    return first_at, "".join(pieces), usage


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The message of an error in OpenAI's form, else the body's beginning."""
    raw = await response.read()
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
