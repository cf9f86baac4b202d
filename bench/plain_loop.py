"""A plain torch loop over the worker's model without paging: the reference side of the engine benchmark (B4).

What one writes in an afternoon: one `linear` a projection, a contiguous KV buffer for equally long sequences,
`scaled_dot_product_attention`.  Same weights as the worker, no continuous batching, no prefix cache.

    python bench/plain_loop.py --threads 2
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from serving.model_files import resolve_model
from worker.models.checkpoint import EMBEDDING, OUTPUT, OUTPUT_NORM, layer_name
from worker.models.load import open_checkpoint
from worker.models.rotary import inverse_frequencies


class PlainLoop:
    """The model of a checkpoint over contiguous KV buffers `[batch, kv heads, length, head_dim]` a layer."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = open_checkpoint(path, dtype)
        self.config = checkpoint.config
        self._weights = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}
        self._dtype = dtype
        config = self.config
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        angles = torch.outer(torch.arange(config.max_position, dtype=torch.float64), frequencies)
        self._cos = torch.cat([angles.cos()] * 2, dim=-1).to(dtype)
        self._sin = torch.cat([angles.sin()] * 2, dim=-1).to(dtype)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._length = 0

    def start(self, batch: int, capacity: int) -> None:
        """Empty buffers for `batch` sequences of up to `capacity` tokens."""
        shape = (batch, self.config.kv_heads, capacity, self.config.head_dim)
        self._keys = [torch.zeros(shape, dtype=self._dtype) for _ in range(self.config.layers)]
        self._values = [torch.zeros(shape, dtype=self._dtype) for _ in range(self.config.layers)]
        self._length = 0

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Run `ids` `[batch, new]` after what ran before; logits of the last position, `[batch, vocab]`."""
        new = ids.shape[1]
        positions = torch.arange(self._length, self._length + new)
        self._length += new
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(ids, self._weights[EMBEDDING])
        for layer in range(self.config.layers):
            hidden = hidden + self._attend(layer, hidden, cos, sin)
            normed = self._norm(hidden, layer_name(layer, "post_attention_layernorm.weight"))
            gate, up = (self._linear(normed, layer_name(layer, f"mlp.{part}_proj")) for part in ("gate", "up"))
            hidden = hidden + self._linear(F.silu(gate) * up, layer_name(layer, "mlp.down_proj"))
        output = EMBEDDING if self.config.tied_embeddings else OUTPUT
        return F.linear(self._norm(hidden[:, -1], OUTPUT_NORM), self._weights[output])

    def _attend(self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, new, _ = hidden.shape
        normed = self._norm(hidden, layer_name(layer, "input_layernorm.weight"))

        def heads(part: str) -> torch.Tensor:
            rows = self._linear(normed, layer_name(layer, f"self_attn.{part}_proj"))
            return rows.view(batch, new, -1, self.config.head_dim).transpose(1, 2)

        query, key, value = heads("q"), heads("k"), heads("v")
        if self.config.qk_norm:
            query = self._norm(query, layer_name(layer, "self_attn.q_norm.weight"))
            key = self._norm(key, layer_name(layer, "self_attn.k_norm.weight"))
        start = self._length - new
        self._keys[layer][:, :, start : self._length] = _rotated(key, cos, sin)
        self._values[layer][:, :, start : self._length] = value
        mask = None
        if new > 1 and start > 0:
            mask = torch.ones(new, self._length, dtype=torch.bool).tril(start)
        mixed = F.scaled_dot_product_attention(
            _rotated(query, cos, sin),
            self._keys[layer][:, :, : self._length],
            self._values[layer][:, :, : self._length],
            attn_mask=mask,
            is_causal=new > 1 and start == 0,
            enable_gqa=True,
        )
        rows = mixed.transpose(1, 2).reshape(batch, new, -1)
        return self._linear(rows, layer_name(layer, "self_attn.o_proj"))

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(rows, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self._weights[name], self.config.norm_eps)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class Speeds(NamedTuple):
    """Tokens a second; the best of several rounds, so that other work on the machine counts little."""

    prefill: float
    decode: dict[int, float]
    """By batch size."""


def measure(
    loop: PlainLoop,
    *,
    prompt: int = 1024,
    context: int = 256,
    steps: int = 16,
    batches: tuple[int, ...] = (1, 8),
    rounds: int = 3,
) -> Speeds:
    """Prefill of one `prompt`, and decode of `steps` tokens after `context` tokens at each batch size."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, loop.config.vocab, (max(batches), max(prompt, context)), generator=generator)
    prefill = 0.0
    decode = dict.fromkeys(batches, 0.0)
    for _ in range(rounds):
        loop.start(1, prompt)
        began = time.perf_counter()
        loop.step(ids[:1, :prompt])
        prefill = max(prefill, prompt / (time.perf_counter() - began))
        for batch in batches:
            loop.start(batch, context + steps)
            token = loop.step(ids[:batch, :context]).argmax(-1, keepdim=True)
            began = time.perf_counter()
            for _ in range(steps):
                token = loop.step(token).argmax(-1, keepdim=True)
            decode[batch] = max(decode[batch], batch * steps / (time.perf_counter() - began))
    return Speeds(prefill, decode)


def main() -> None:
    """Print the loop's speeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="short name, .gguf file or checkpoint folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loop = PlainLoop(resolve_model(arguments.model), dtype=getattr(torch, arguments.dtype))
    speeds = measure(loop, rounds=arguments.rounds)
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "prefill_tokens_per_s": round(speeds.prefill, 1),
        **{f"decode_batch_{batch}_tokens_per_s": round(speed, 1) for batch, speed in speeds.decode.items()},
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:32} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
