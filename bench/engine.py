"""The worker's engine beside a plain torch loop with the same weights: prefill, decode, bookkeeping, cold and warm.

Both sides take turns in one process, so that a slow moment of the machine meets both; of each figure the best of
several rounds counts.  The engine side is everything behind HTTP: admission, paged cache, hashing, sampling, text.

    python bench/engine.py --threads 2
    python bench/engine.py --threads 2 --json
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from plain_loop import PlainLoop, measure

from context import DynamicInferenceContext, InferenceConfig, PrefixCachingEvictionPolicy
from serving.model_files import resolve_model
from serving.tokenizer import Tokenizer, load_tokenizer
from worker.engine import EngineCore, GenerationRequest, Limits, Output
from worker.models import Model, load_model
from worker.sampling import SamplingSettings

PREFILL_TOKENS = 1024
DECODE_CONTEXT = 256
DECODE_STEPS = 16
BATCHES = (1, 8)
LONG_PROMPT, CACHED_PART = 1500, 1450
MANY_REQUESTS, MANY_STEPS = 256, 6
BLOCK_SIZE = 16


@dataclass
class Side:
    """Best figures of one side, tokens a second."""

    prefill: float = 0.0
    decode: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BATCHES, 0.0))

    def better(self, prefill: float, decode: dict[int, float]) -> None:
        """Take a round's figures where they are the best so far."""
        self.prefill = max(self.prefill, prefill)
        self.decode = {batch: max(self.decode[batch], decode[batch]) for batch in BATCHES}


class EngineSide:
    """An engine core without its thread, driven step by step."""

    def __init__(self, model: Model, tokenizer: Tokenizer, *, max_tokens: int, max_requests: int) -> None:
        self._vocabulary = tokenizer.vocab_size
        context = DynamicInferenceContext(
            model.transformer_config(),
            InferenceConfig(
                max_sequence_length=2048, buffer_size_gb=1.0, block_size_tokens=BLOCK_SIZE, max_requests=max_requests,
                max_tokens=max_tokens, enable_prefix_caching=True, enable_chunked_prefill=True,
                prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
            ),
        )  # fmt: skip
        context.dynamo_helper.add_kv_event_listener(lambda kind, payload: None)
        self.core = EngineCore(model, context, tokenizer)
        self._seed = 0

    def prompt(self, length: int) -> list[int]:
        """Tokens that no earlier prompt began with."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        tokens: list[int] = torch.randint(1000, self._vocabulary, (length,), generator=generator).tolist()
        return tokens

    def add(self, prompt: list[int], count: int) -> list[Output]:
        """Queue a greedy generation."""
        outputs: list[Output] = []
        request = GenerationRequest(prompt, Limits(count), SamplingSettings(temperature=0.0))
        self.core.add(self.core.prepare(request, outputs.append))
        return outputs

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the first token of a prompt, and how many of its tokens were cached."""
        began = time.perf_counter()
        outputs = self.add(prompt, 1)
        while not outputs:
            self.core.step()
        return time.perf_counter() - began, outputs[0].cached_tokens

    def decode(self, batch: int, context: int, steps: int) -> tuple[float, float, float]:
        """Seconds of `steps` decode steps, of their forwards, and the median step's seconds outside forward and
        sampling.
        """
        outputs = [self.add(self.prompt(context), steps + 2) for _ in range(batch)]
        while not all(outputs):
            self.core.step()
        counters, forwards, outside = self.core.counters, 0.0, []
        began = time.perf_counter()
        for _ in range(steps):
            step, forward, sampling = counters.step_seconds, counters.forward_seconds, counters.sample_seconds
            self.core.step()
            forwards += counters.forward_seconds - forward
            model = counters.forward_seconds - forward + counters.sample_seconds - sampling
            outside.append(counters.step_seconds - step - model)
        seconds = time.perf_counter() - began
        while self.core.has_work:
            self.core.step()
        return seconds, forwards, statistics.median(outside)


@dataclass
class Result:
    """Everything measured."""

    loop: Side = field(default_factory=Side)
    engine: Side = field(default_factory=Side)
    bookkeeping_share_at_8: float = 1.0
    bookkeeping_ms_at_256: float = 1e9
    cold_ms: float = 1e9
    warm_ms: float = 1e9
    warm_cached_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        """Figures and ratios."""
        return {
            **asdict(self),
            "prefill_ratio": round(self.engine.prefill / self.loop.prefill, 3),
            "decode_ratio": {batch: round(self.engine.decode[batch] / self.loop.decode[batch], 3) for batch in BATCHES},
            "warm_speedup": round(self.cold_ms / self.warm_ms, 1),
        }

    def table(self) -> str:
        """The figures for a reader."""

        def row(name: str, loop: float, engine: float, goal: str) -> str:
            return f"{name:<34} {loop:>10.1f} {engine:>10.1f} {engine / loop:>8.2f}  {goal}"

        rows = [
            f"{'tokens/s':<34} {'loop':>10} {'engine':>10} {'ratio':>8}  goal",
            row(f"prefill of {PREFILL_TOKENS}", self.loop.prefill, self.engine.prefill, ">= 0.95"),
            *(
                row(f"decode, batch {batch}", self.loop.decode[batch], self.engine.decode[batch], goal)
                for batch, goal in zip(BATCHES, ("", ">= 1.2"), strict=True)
            ),
            f"outside the forward, batch 8: {self.bookkeeping_share_at_8:.1%} of a step, with sampling (goal <= 3 %)",
            f"outside forward and sampling, batch {MANY_REQUESTS}: {self.bookkeeping_ms_at_256:.2f} ms a step",
            f"first token of {LONG_PROMPT} tokens: cold {self.cold_ms:.0f} ms, with {self.warm_cached_tokens} cached "
            f"{self.warm_ms:.0f} ms: {self.cold_ms / self.warm_ms:.1f} times sooner (goal >= 12)",
        ]
        return "\n".join(rows)


def run(path: Path, dtype: torch.dtype, rounds: int, max_tokens: int) -> Result:
    """Measure both sides, turn by turn."""
    result = Result()
    loop = PlainLoop(path, dtype=dtype)
    model, tokenizer = load_model(path, dtype=dtype), load_tokenizer(path)
    side = EngineSide(model, tokenizer, max_tokens=max_tokens, max_requests=MANY_REQUESTS)
    side.first_token(side.prompt(64))
    for _ in range(rounds):
        speeds = measure(
            loop, prompt=PREFILL_TOKENS, context=DECODE_CONTEXT, steps=DECODE_STEPS, batches=BATCHES, rounds=1
        )
        result.loop.better(speeds.prefill, speeds.decode)
        prefill = PREFILL_TOKENS / side.first_token(side.prompt(PREFILL_TOKENS))[0]
        decode = {}
        for batch in BATCHES:
            seconds, forwards, _ = side.decode(batch, DECODE_CONTEXT, DECODE_STEPS)
            decode[batch] = batch * DECODE_STEPS / seconds
            if batch == 8:
                result.bookkeeping_share_at_8 = min(result.bookkeeping_share_at_8, 1 - forwards / seconds)
        result.engine.better(prefill, decode)
        long = side.prompt(LONG_PROMPT)
        result.cold_ms = min(result.cold_ms, side.first_token(long)[0] * 1000)
        seconds, cached = side.first_token(long[:CACHED_PART] + side.prompt(LONG_PROMPT - CACHED_PART))
        result.warm_ms, result.warm_cached_tokens = min(result.warm_ms, seconds * 1000), cached
    _, _, outside = side.decode(MANY_REQUESTS, BLOCK_SIZE // 2, MANY_STEPS)
    result.bookkeeping_ms_at_256 = outside * 1000
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="short name, .gguf file or checkpoint folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=1024, help="step token budget, as the worker's")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = run(
        resolve_model(arguments.model), getattr(torch, arguments.dtype), arguments.rounds, arguments.max_tokens
    )
    where = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
    }
    if arguments.json:
        print(json.dumps(where | result.as_dict()))
    else:
        print(", ".join(f"{key} {value}" for key, value in where.items()))
        print(result.table())


if __name__ == "__main__":
    main()
