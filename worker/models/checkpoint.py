"""What a checkpoint offers to the loader, whatever its format, and the names of its tensors."""

from collections.abc import Iterator
from typing import Protocol

import torch

from worker.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


class Checkpoint(Protocol):
    """An open checkpoint.  Tensors go by the names of the Hugging Face layout of Llama."""

    config: ModelConfig

    def names(self) -> set[str]:
        """Every tensor of the checkpoint that matters for inference."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on CPU, in any float type, q and k rows in the order of rotated halves."""
        ...


def layer_name(layer: int, part: str) -> str:
    """Name of a tensor of layer `layer` (from 0), such as ("self_attn.q_proj.weight")."""
    return f"model.layers.{layer}.{part}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab, config.hidden),
        OUTPUT_NORM: (config.hidden,),
    }
    if not config.tied_embeddings:
        shapes[OUTPUT] = (config.vocab, config.hidden)
    for layer in range(config.layers):
        shapes.update({layer_name(layer, part): shape for part, shape in _layer_shapes(config)})
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "input_layernorm.weight", (config.hidden,)
    yield "post_attention_layernorm.weight", (config.hidden,)
    for name, size in (("q", query), ("k", key), ("v", key)):
        yield f"self_attn.{name}_proj.weight", (size, config.hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (config.hidden, query)
    if config.output_bias:
        yield "self_attn.o_proj.bias", (config.hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "mlp.gate_proj.weight", (config.intermediate, config.hidden)
    yield "mlp.up_proj.weight", (config.intermediate, config.hidden)
    yield "mlp.down_proj.weight", (config.hidden, config.intermediate)
