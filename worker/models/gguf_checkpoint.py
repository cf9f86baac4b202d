"""Reads a model from a GGUF file: shape from the metadata, tensors dequantised one at a time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from serving.gguf_file import GGUFHeader, read_header
from worker.models.checkpoint import EMBEDDING, OUTPUT, OUTPUT_NORM
from worker.models.config import ModelConfig
from worker.models.errors import ModelLoadError
from worker.models.rotary import FrequencyFactors, LinearScaling, RopeScaling

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": OUTPUT_NORM, "output.weight": OUTPUT}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """Implements `Checkpoint` over one GGUF file.

    Raises `ModelLoadError` for an architecture or a rotary scaling that is not supported, `GGUFError` for a
    broken file.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path = path
        self._header = read_header(path)
        # As a plain array: slicing a memmap object costs more than what it saves here.
        self._data = np.asarray(np.memmap(path, mode="r", dtype=np.uint8))
        self._stored = {_common_name(name): name for name in self._header.tensors if name != _ROPE_FACTORS}
        self.config = self._read_config(dtype)

    def names(self) -> set[str]:
        """See `Checkpoint.names`."""
        return set(self._stored)

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`; float32."""
        tensor = self._dequantised(self._stored[name])
        if self.config.architecture == "llama":
            # Files of this architecture keep q and k rows in the order of adjacent pairs.
            if ".q_proj." in name:
                return _halves_first(tensor, self.config.heads)
            if ".k_proj." in name:
                return _halves_first(tensor, self.config.kv_heads)
        return tensor

    def _dequantised(self, stored: str) -> torch.Tensor:
        entry = self._header.tensors[stored]
        try:
            kind = GGMLQuantizationType(entry.type)
            block, size = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelLoadError(f"{self._path}: tensor {stored!r} has the unknown type {entry.type}") from None
        if not entry.shape:
            raise ModelLoadError(f"{self._path}: tensor {stored!r} has no dimensions")
        *outer, inner = entry.shape
        length = math.prod(outer) * (inner // block) * size
        raw = self._data[entry.offset : entry.offset + length]
        if raw.size != length or inner % block:
            raise ModelLoadError(f"{self._path}: tensor {stored!r} is cut off at byte {self._data.size}")
        try:
            values = dequantize(raw.reshape(*outer, inner // block * size), kind)
        except NotImplementedError:
            raise ModelLoadError(f"{self._path}: tensor {stored!r} is {kind.name}, not supported") from None
        # A float32 tensor comes back as a view of the file, which torch may not write to.
        whole = np.require(values, np.float32, ["C", "W"]).reshape(entry.shape)
        return torch.from_numpy(whole)

    def _read_config(self, dtype: torch.dtype) -> ModelConfig:
        header = self._header
        architecture = header.require("general.architecture", str)
        if architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{self._path}: architecture {architecture!r} is not supported; "
                f"supported in GGUF files are {', '.join(_ARCHITECTURES)}"
            )

        def number(key: str) -> int:
            return header.require(f"{architecture}.{key}", int)

        hidden, heads = number("embedding_length"), number("attention.head_count")
        head_dim = self._optional(architecture, "attention.key_length", hidden // heads)
        if self._optional(architecture, "rope.dimension_count", head_dim) != head_dim:
            raise ModelLoadError(f"{self._path}: rotation of a part of each head is not supported")
        if EMBEDDING not in self._stored:
            raise ModelLoadError(f"{self._path}: tensor 'token_embd.weight' is missing")
        return ModelConfig(
            architecture=architecture,
            layers=number("block_count"),
            hidden=hidden,
            intermediate=number("feed_forward_length"),
            heads=heads,
            kv_heads=self._optional(architecture, "attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=header.tensors["token_embd.weight"].shape[0],
            max_position=number("context_length"),
            rope_theta=self._optional(architecture, "rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(header, architecture),
            norm_eps=header.require(f"{architecture}.attention.layer_norm_rms_epsilon", float),
            tied_embeddings=OUTPUT not in self._stored,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._stored,
            output_bias="model.layers.0.self_attn.o_proj.bias" in self._stored,
            qk_norm=architecture == "qwen3",
            dtype=dtype,
        )

    def _optional(self, architecture: str, key: str, default: Any) -> Any:
        value = self._header.metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelLoadError(f"{self._path}: {architecture}.{key} is {value!r}; one number is needed")
        return value

    def _rope_scaling(self, header: GGUFHeader, architecture: str) -> RopeScaling | None:
        if _ROPE_FACTORS in header.tensors:
            return FrequencyFactors(tuple(self._dequantised(_ROPE_FACTORS).tolist()))
        kind = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return LinearScaling(header.require(f"{architecture}.rope.scaling.factor", float))
        raise ModelLoadError(f"{self._path}: rotary scaling {kind!r} is not supported; 'linear' is")


def _common_name(stored: str) -> str:
    """The name in the layout of `Checkpoint`; a name that has none stays, and is reported as unexpected."""
    if stored in _TOP:
        return _TOP[stored]
    parts = stored.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_PARTS:
        return f"model.layers.{parts[1]}.{_LAYER_PARTS[parts[2]]}.{parts[3]}"
    return stored


def _halves_first(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from adjacent pairs (0, 1), (2, 3) ... to first members, then second ones."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
