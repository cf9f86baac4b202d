"""Reads a model from a checkpoint folder: config.json and safetensors, in one file or several."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.models.config import ModelConfig
from worker.models.errors import ModelLoadError
from worker.models.rotary import LinearScaling, Llama3Scaling, RopeScaling

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store these frequencies, which follow from the configuration."""


class FolderCheckpoint:
    """Implements `Checkpoint` over a folder.  Raises `ModelLoadError` for what it cannot serve exactly."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)
        self._open: dict[Path, Any] = {}
        settings = _read_json(folder / "config.json")
        self.config = _Settings(folder / "config.json", settings).model_config(dtype)
        if self.config.tied_embeddings:
            # Some writers repeat the shared matrix under its second name.
            self._files.pop("lm_head.weight", None)

    def names(self) -> set[str]:
        """See `Checkpoint.names`."""
        return {name for name in self._files if not name.endswith(_DERIVED)}

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: tensor {name!r} cannot be read: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = folder / _INDEX
    if index.is_file():
        mapping = _read_json(index).get("weight_map")
        if not isinstance(mapping, dict):
            raise ModelLoadError(f"{index}: weight_map is missing")
        files = {name: folder / file for name, file in mapping.items()}
        absent = sorted({path.name for path in files.values() if not path.is_file()})
        if absent:
            raise ModelLoadError(f"{index}: these files are named but not there: {', '.join(absent)}")
        return files
    single = folder / _SINGLE
    if not single.is_file():
        raise ModelLoadError(f"{folder}: neither {_SINGLE} nor {_INDEX}; only safetensors are read")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{single}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value


class _Settings:
    """The values of a config.json, with errors that name the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def model_config(self, dtype: torch.dtype) -> ModelConfig:
        architecture = self._architecture()
        self._refuse_unsupported()
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        bias = bool(self._values.get("attention_bias", False))
        return ModelConfig(
            architecture=architecture,
            layers=self._number("num_hidden_layers"),
            hidden=hidden,
            intermediate=self._number("intermediate_size"),
            heads=heads,
            kv_heads=self._number("num_key_value_heads", heads),
            head_dim=self._number("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads),
            vocab=self._number("vocab_size"),
            max_position=self._max_position(),
            rope_theta=float(self._rope().get("rope_theta", self._values.get("rope_theta", 10000.0))),
            rope_scaling=self._rope_scaling(),
            norm_eps=float(self._values.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(self._values.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=dtype,
        )

    def _architecture(self) -> str:
        names = self._values.get("architectures") or [None]
        if names[0] not in _ARCHITECTURES:
            raise ModelLoadError(f"{self._path}: architectures is {names}; supported are {', '.join(_ARCHITECTURES)}")
        return names[0]

    def _refuse_unsupported(self) -> None:
        for key, supported in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
            value = self._values.get(key, supported)
            if value != supported:
                raise ModelLoadError(f"{self._path}: {key} is {value!r}; only {supported!r} is supported")

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"{self._path}: {key} is {value!r}; a positive integer is needed")
        return value

    def _max_position(self) -> int:
        longest = self._number("max_position_embeddings")
        window = self._values.get("sliding_window")
        if window is None or self._values.get("use_sliding_window") is False:
            return longest
        # Within one window, windowed attention is full attention.
        return min(longest, self._number("sliding_window"))

    def _rope(self) -> dict[str, Any]:
        return self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}

    def _rope_scaling(self) -> RopeScaling | None:
        rope = self._rope()
        kind = rope.get("rope_type", rope.get("type", "default"))
        try:
            if kind == "default":
                return None
            if kind == "linear":
                return LinearScaling(float(rope["factor"]))
            if kind == "llama3":
                return Llama3Scaling(
                    factor=float(rope["factor"]),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                    original_max_position=int(rope["original_max_position_embeddings"]),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{self._path}: rope_scaling of type {kind!r}: {error!r}") from error
        raise ModelLoadError(
            f"{self._path}: rope_scaling of type {kind!r} is not supported; default, linear and llama3 are"
        )
