"""The small worlds that the worker's tests live in: a tiny random model, engines over it, collected outputs."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import save_file

from context import DynamicInferenceContext, InferenceConfig, PrefixCachingEvictionPolicy
from serving.sse import SSEParser
from serving.tokenizer import Tokenizer
from worker.engine import EngineCore, FinishReason, GenerationRequest, Limits, Output
from worker.main import Running
from worker.models import Model, load_model
from worker.models.checkpoint import expected_shapes
from worker.models.folder_checkpoint import FolderCheckpoint
from worker.sampling import SamplingSettings

BLOCK_SIZE = 8


def tiny_model(folder: Path, vocabulary: int) -> Model:
    """A random Llama of two narrow layers, saved as a checkpoint and loaded like any other."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"placeholder": torch.zeros(1)}, folder / "model.safetensors")
    shapes = expected_shapes(FolderCheckpoint(folder, torch.float32).config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        # Wide enough that the likeliest token leads by far more than float32 noise.
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.35
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return load_model(folder)


@dataclass
class Collected:
    """What one generation has put out."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    number: int = -1

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.text += output.text
        self.tokens += [token.token for token in output.tokens]

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def error(self) -> str | None:
        return self.outputs[-1].error if self.outputs else None

    @property
    def cached_tokens(self) -> int:
        return self.outputs[-1].cached_tokens


class Failing:
    """A model whose forward raises when `should_fail` says so."""

    def __init__(self, model: Model, should_fail: Callable[[DynamicInferenceContext], bool]) -> None:
        self._model, self._should_fail = model, should_fail
        self.config = model.config
        self.failed = 0

    def forward(self, input_ids: Any, position_ids: Any, context: Any, logit_rows: Any = None) -> torch.Tensor:
        if self._should_fail(context):
            self.failed += 1
            raise RuntimeError("the device is on fire")
        return self._model.forward(input_ids, position_ids, context, logit_rows)


class Scripted:
    """A model that says given tokens: after a prompt of `prompt_length` tokens `script[0]`, and so on."""

    def __init__(self, model: Model, prompt_length: int, script: list[int]) -> None:
        self.config = model.config
        self._prompt_length, self._script = prompt_length, script

    def forward(self, input_ids: Any, position_ids: Any, context: Any, logit_rows: Any = None) -> torch.Tensor:
        places = (position_ids[0][logit_rows] + 1 - self._prompt_length).tolist()
        logits = torch.zeros(1, len(places), self.config.vocab)
        for row, place in enumerate(places):
            if 0 <= place < len(self._script):
                logits[0, row, self._script[place]] = 50.0
        return logits


class EngineWorld:
    """An engine core over a pool of a few blocks, with the KV events it announces."""

    def __init__(
        self,
        model: Any,
        shape: Model,
        tokenizer: Tokenizer,
        *,
        blocks: int = 64,
        max_requests: int = 8,
        max_tokens: int = 64,
        max_length: int = 256,
        policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU,
    ) -> None:
        transformer = shape.transformer_config()
        block_bytes = 4 * 2 * 2 * BLOCK_SIZE * 2 * transformer.head_dim
        self.context = DynamicInferenceContext(
            transformer,
            InferenceConfig(
                max_sequence_length=max_length, buffer_size_gb=(blocks + 0.5) * block_bytes / 2**30,
                block_size_tokens=BLOCK_SIZE, max_requests=max_requests, max_tokens=max_tokens,
                enable_prefix_caching=True, prefix_caching_eviction_policy=policy, enable_chunked_prefill=True,
            ),
        )  # fmt: skip
        assert self.context.kv_block_allocator.total_count == blocks
        self.announced: set[int] = set()
        self.context.dynamo_helper.add_kv_event_listener(self._hear)
        self.steps_told = 0
        self.core = EngineCore(model, self.context, tokenizer, on_step_end=self._step_told)

    def _hear(self, kind: str, payload: dict[str, Any]) -> None:
        if kind == "stored":
            assert not self.announced & set(payload["block_hashes"]), "announced twice"
            self.announced |= set(payload["block_hashes"])
        elif kind == "removed":
            self.announced -= set(payload["block_hashes"])
        else:
            self.announced.clear()

    def _step_told(self) -> None:
        self.steps_told += 1

    def add(self, prompt: list[int], count: int = 8, **fields: Any) -> Collected:
        """Queue a greedy generation of `count` tokens; `fields` are those of limits, settings and request."""
        collected = Collected()
        limits = {k: fields.pop(k) for k in ("min_tokens", "token_ids", "strings", "include_stop") if k in fields}
        request = {k: fields.pop(k) for k in ("skip_special_tokens", "cacheable") if k in fields}
        settings = SamplingSettings(**({"temperature": 0.0} | fields))
        generation = self.core.prepare(
            GenerationRequest(prompt, Limits(count, **limits), settings, **request), collected
        )
        collected.number = generation.number
        self.core.add(generation)
        return collected

    def step(self, steps: int = 1) -> None:
        """Some steps, each followed by a check of every invariant."""
        for _ in range(steps):
            self.core.step()
            self.check()

    def run(self, most_steps: int = 2000) -> None:
        """Until there is no work."""
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {most_steps} steps")

    def check(self) -> None:
        """The context's own invariants, and that what was announced is what is registered."""
        self.context.check_integrity()
        assert self.announced == set(self.context.kv_block_allocator.kv_hash_to_block_id)

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.core.load.used_blocks


def prompt_of(length: int, seed: int = 0, vocabulary: int = 49152) -> list[int]:
    """Random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(1000, vocabulary, (length,), generator=generator).tolist()
    return tokens


class Served:
    """A running worker seen from outside."""

    def __init__(self, running: Running, session: aiohttp.ClientSession) -> None:
        self.worker = running.worker
        self.address = running.address
        self.session = session

    @property
    def model(self) -> str:
        return self.worker.model

    @property
    def free_blocks(self) -> int:
        load = self.worker.engine.load
        return load.total_blocks - load.used_blocks

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a POST; the model is filled in."""
        async with self.session.post(self.address + path, json={"model": self.model} | body) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion that succeeds; greedy unless said otherwise."""
        status, answer = await self.post("/v1/completions", **({"prompt": prompt, "temperature": 0} | body))
        assert status == 200, answer
        return answer

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of a POST that is refused, its status included."""
        status, answer = await self.post(path, **body)
        assert status >= 400, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer["error"] | {"status": status}

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end as OpenAI's do."""
        parser, events = SSEParser(), []
        payload = {"model": self.model, "stream": True} | body
        async with self.session.post(self.address + path, json=payload) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            async for data in response.content.iter_any():
                events += parser.feed(data)
        assert events[-1].is_done
        chunks = [json.loads(event.data) for event in events[:-1]]
        assert len({chunk["id"] for chunk in chunks}) == 1
        return chunks

    async def idle(self) -> None:
        """Wait until the engine has nothing left to do and has said so."""
        engine = self.worker.engine
        await until(lambda: not engine.core.has_work and not engine.load.used_blocks, "the engine is idle")

    async def running(self, count: int = 1) -> None:
        """Wait until so many requests run."""
        await until(lambda: self.worker.engine.load.running >= count, f"{count} requests run")


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll a condition that has no event of its own.  Raises AssertionError that says what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.002)
