"""The shape of a decoder-only transformer, independent of the file that it came from."""

from dataclasses import dataclass

import torch

from context import TransformerConfig
from worker.models.rotary import RopeScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of one model."""

    architecture: str
    """Name in the checkpoint: "LlamaForCausalLM", or GGUF's "llama"."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the gated feed-forward block."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the output layer; may be padded beyond the tokenizer's vocabulary."""
    max_position: int
    """Longest sequence, in tokens, that the model was made for (and that its attention window covers)."""
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Whether the attention output projection has a bias."""
    qk_norm: bool
    """Whether each head's query and key pass an RMS norm before the rotation (Qwen3)."""
    dtype: torch.dtype
    """In which weights, activations and the KV cache are kept."""

    def transformer_config(self) -> TransformerConfig:
        """What the inference context needs to know to lay out its KV cache."""
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            kv_channels=self.head_dim,
            params_dtype=self.dtype,
        )
