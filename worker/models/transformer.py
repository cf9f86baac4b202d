"""The forward pass of a decoder-only transformer whose keys and values live in an inference context."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from context import TransformerConfig
from worker.models.config import ModelConfig
from worker.models.linear import Linear
from worker.models.rotary import RotaryTable, rotate_


class AttentionContext(Protocol):
    """What the model asks of `DynamicInferenceContext`.  Layer numbers start at 1."""

    def append_key_value_cache(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's keys and values, `[N, 1, kv heads, head_dim]` each."""
        ...

    def attention(self, layer_number: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's queries `[N, 1, heads, head_dim]`, over all stored; same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer.  `qkv` gives query, key and value side by side, `gate_up` gate and up."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a whole model."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    output_norm: torch.Tensor
    output: Linear


class Model:
    """A loaded model.  One forward at a time; it keeps no state between them."""

    def __init__(self, config: ModelConfig, weights: Weights, rotary: RotaryTable) -> None:
        self.config = config
        self._weights = weights
        self._rotary = rotary
        self._hidden_size = (config.hidden,)
        self._head_size = (config.head_dim,)
        self._qk_heads = config.heads + config.kv_heads

    @property
    def device(self) -> torch.device:
        """Where inputs must be and logits are."""
        return self._weights.embedding.device

    def transformer_config(self) -> TransformerConfig:
        """What the inference context needs to know to lay out its KV cache."""
        return self.config.transformer_config()

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: AttentionContext,
        logit_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[1, rows, vocab]` of one step, in the model's dtype.

        `input_ids`, `position_ids`: int64 `[1, N]`, the packed tokens of all requests, positions below
        `max_position`.  `logit_rows`: int64 `[rows]`, the tokens whose logits are wanted; all N when None.
        Fewer rows save most of the output layer.  The result is an inference tensor: change it in place under
        `torch.inference_mode` only.
        """
        cos_sin = self._rotary.at(position_ids[0])
        hidden = F.embedding(input_ids[0], self._weights.embedding)
        for number, layer in enumerate(self._weights.layers, start=1):
            hidden += self._attend(layer, number, hidden, cos_sin, context)
            hidden += self._feed_forward(layer, hidden)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        return self._weights.output(self._norm(hidden, self._weights.output_norm)).unsqueeze(0)

    def _attend(
        self,
        layer: Layer,
        number: int,
        hidden: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
    ) -> torch.Tensor:
        config = self.config
        rows = hidden.shape[0]
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm)).view(rows, -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = qkv[:, : config.heads], qkv[:, config.heads : self._qk_heads]
            query.copy_(F.rms_norm(query, self._head_size, layer.q_norm, config.norm_eps))
            key.copy_(F.rms_norm(key, self._head_size, layer.k_norm, config.norm_eps))
        rotate_(qkv[:, : self._qk_heads], *cos_sin)
        query, key, value = qkv.unsqueeze(1).split((config.heads, config.kv_heads, config.kv_heads), dim=2)
        context.append_key_value_cache(number, key, value)
        mixed = context.attention(number, query)
        return layer.attention_output(mixed.reshape(rows, -1))

    def _feed_forward(self, layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.feed_forward_norm)).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, self._hidden_size, weight, self.config.norm_eps)
