"""The oracle: a plain forward in float64 over the files themselves, without cache and one head at a time.

It shares no code with worker/models: tensors come through the formats' own readers, GGUF weights of Llama stay
interleaved and are rotated as complex numbers, and attention is written out.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import gguf
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor


class Shape(NamedTuple):
    """What the forward needs to know besides the tensors."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    angles: list[float]
    """Radians a position, a pair of channels."""
    interleaved: bool


class Reference:
    """A model as its tensors, by the names of the GGUF layout."""

    def __init__(self, tensors: dict[str, Tensor], shape: Shape) -> None:
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._shape = shape

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """float64 `[len(ids), vocab]`."""
        t = self._tensors
        x = t["token_embd.weight"][ids]
        for layer in range(self._shape.layers):
            x = x + self._attention(f"blk.{layer}", self._norm(x, f"blk.{layer}.attn_norm"))
            y = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = y @ t[f"blk.{layer}.ffn_gate.weight"].T
            up = y @ t[f"blk.{layer}.ffn_up.weight"].T
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ t[f"blk.{layer}.ffn_down.weight"].T
        return self._norm(x, "output_norm") @ t.get("output.weight", t["token_embd.weight"]).T

    def _attention(self, at: str, x: Tensor) -> Tensor:
        shape, length = self._shape, len(x)
        query = self._rotated(self._heads(at, "q", x))
        key = self._rotated(self._heads(at, "k", x))
        value = self._heads(at, "v", x)
        future = torch.ones(length, length).triu(1).bool()
        mixed = []
        for head in range(shape.heads):
            group = head * shape.kv_heads // shape.heads
            scores = query[:, head] @ key[:, group].T / math.sqrt(shape.head_dim)
            mixed.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value[:, group])
        return self._linear(f"{at}.attn_output", torch.cat(mixed, dim=-1))

    def _heads(self, at: str, part: str, x: Tensor) -> Tensor:
        heads = self._linear(f"{at}.attn_{part}", x).reshape(len(x), -1, self._shape.head_dim)
        norm = f"{at}.attn_{part}_norm"
        return self._norm(heads, norm) if f"{norm}.weight" in self._tensors else heads

    def _rotated(self, heads: Tensor) -> Tensor:
        turns = torch.outer(torch.arange(len(heads)).double(), torch.tensor(self._shape.angles).double())
        unit = torch.polar(torch.ones_like(turns), turns)[:, None, :]
        if self._shape.interleaved:
            return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * unit).flatten(
                -2
            )
        first, second = heads.chunk(2, dim=-1)
        turned = torch.complex(first, second) * unit
        return torch.cat([turned.real, turned.imag], dim=-1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors.get(f"{name}.bias", torch.zeros(1).double())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self._shape.eps) * self._tensors[f"{name}.weight"]


def plain_angles(head_dim: int, theta: float) -> list[float]:
    """Radians a position of every pair of channels."""
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


def reference_of_gguf(path: Path) -> Reference:
    """A GGUF file through the package's own reader; some seconds for a real vocabulary."""
    reader = gguf.GGUFReader(path)

    def value(key: str) -> float:
        return reader.fields[f"{architecture}.{key}"].contents()

    architecture = reader.fields["general.architecture"].contents()
    tensors = {
        entry.name: torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy()) for entry in reader.tensors
    }
    heads = int(value("attention.head_count"))
    head_dim = int(value("embedding_length")) // heads
    return Reference(
        tensors,
        Shape(
            layers=int(value("block_count")),
            heads=heads,
            kv_heads=int(value("attention.head_count_kv")),
            head_dim=head_dim,
            eps=value("attention.layer_norm_rms_epsilon"),
            angles=plain_angles(head_dim, value("rope.freq_base")),
            interleaved=architecture == "llama",
        ),
    )


_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def reference_of_folder(folder: Path, angles: list[float] | None = None) -> Reference:
    """A checkpoint folder; `angles` where the rotation is not the plain one."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            for theirs, ours in _PARTS.items():
                name = name.replace(theirs, ours)
            tensors[name] = tensor
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return Reference(
        tensors,
        Shape(
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            eps=config["rms_norm_eps"],
            angles=angles or plain_angles(head_dim, config["rope_theta"]),
            interleaved=False,
        ),
    )
