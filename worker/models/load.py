"""Loads a model: opens the checkpoint, checks that it is complete, fuses and places the weights."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from worker.models.checkpoint import EMBEDDING, OUTPUT, OUTPUT_NORM, Checkpoint, expected_shapes, layer_name
from worker.models.errors import ModelLoadError
from worker.models.folder_checkpoint import FolderCheckpoint
from worker.models.gguf_checkpoint import GGUFCheckpoint
from worker.models.linear import Linear, make_linear
from worker.models.rotary import RotaryTable, inverse_frequencies
from worker.models.transformer import Layer, Model, Weights

Progress = Callable[[str, float], None]
"""Called with what is being done and which fraction of all is done, 0 to 1."""

_NAMES_SHOWN = 5
_SPENDABLE_BYTES = 2 << 30
"""Weights up to this size may be kept in two layouts where that is faster."""


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Model:
    """Load a GGUF file, or a folder with config.json and safetensors, to `device` in `dtype`.

    float32 is the default because CPUs without bfloat16 instructions multiply bfloat16 many times slower.
    Raises `ModelLoadError` (or `GGUFError`) naming what is unsupported, missing, unexpected or misshapen.
    """
    path = Path(path)
    report = progress or _silent
    report("reading the header", 0.0)
    checkpoint = open_checkpoint(path, dtype)
    loader = _Loader(path, checkpoint, dtype, torch.device(device), report)
    weights = loader.weights()
    config = checkpoint.config
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    rotary = RotaryTable(frequencies, config.max_position, dtype=dtype, device=torch.device(device))
    report("loaded", 1.0)
    return Model(config, weights, rotary)


def open_checkpoint(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Open what lies at `path` and check that it holds exactly the tensors of its architecture.

    Raises as `load_model` does.
    """
    checkpoint: Checkpoint = FolderCheckpoint(path, dtype) if path.is_dir() else GGUFCheckpoint(path, dtype)
    _check_names(path, checkpoint)
    return checkpoint


def _silent(_stage: str, _fraction: float) -> None:
    return


def _check_names(path: Path, checkpoint: Checkpoint) -> None:
    present = checkpoint.names()
    expected = expected_shapes(checkpoint.config).keys()
    problems = [
        f"{len(names)} {what}: {', '.join(sorted(names)[:_NAMES_SHOWN])}"
        for what, names in (("missing", expected - present), ("unexpected", present - expected))
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"{path}: the tensors are not those of {checkpoint.config.architecture}; {'; '.join(problems)}"
        )


class _Loader:
    """Takes tensors out of a checkpoint layer by layer, so that little is held twice."""

    def __init__(
        self, path: Path, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, report: Progress
    ) -> None:
        self._path = path
        self._checkpoint = checkpoint
        self._shapes = expected_shapes(checkpoint.config)
        self._dtype = dtype
        self._device = device
        self._report = report
        size = sum(math.prod(shape) for shape in self._shapes.values()) * dtype.itemsize
        self._spend_memory = size <= _SPENDABLE_BYTES

    def weights(self) -> Weights:
        config = self._checkpoint.config
        steps = config.layers + 1
        embedding = self._take(EMBEDDING)
        layers = []
        for layer in range(config.layers):
            self._report("loading weights", layer / steps)
            layers.append(self._layer(layer))
        self._report("loading weights", config.layers / steps)
        output = make_linear(
            embedding if config.tied_embeddings else self._take(OUTPUT), spend_memory=self._spend_memory
        )
        return Weights(embedding, tuple(layers), self._take(OUTPUT_NORM), output)

    def _layer(self, layer: int) -> Layer:
        config = self._checkpoint.config

        def name(part: str) -> str:
            return layer_name(layer, part)

        return Layer(
            attention_norm=self._take(name("input_layernorm.weight")),
            qkv=self._fused([name(f"self_attn.{part}_proj") for part in "qkv"], bias=config.qkv_bias),
            q_norm=self._take(name("self_attn.q_norm.weight")) if config.qk_norm else None,
            k_norm=self._take(name("self_attn.k_norm.weight")) if config.qk_norm else None,
            attention_output=self._fused([name("self_attn.o_proj")], bias=config.output_bias),
            feed_forward_norm=self._take(name("post_attention_layernorm.weight")),
            gate_up=self._fused([name("mlp.gate_proj"), name("mlp.up_proj")]),
            down=self._fused([name("mlp.down_proj")]),
        )

    def _fused(self, names: list[str], *, bias: bool = False) -> Linear:
        """One product that gives the outputs of several, side by side."""
        weight = torch.cat([self._take(f"{name}.weight") for name in names])
        biases = torch.cat([self._take(f"{name}.bias") for name in names]) if bias else None
        return make_linear(weight, biases, spend_memory=self._spend_memory)

    def _take(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelLoadError(
                f"{self._path}: tensor {name!r} has shape {tuple(tensor.shape)}, not {self._shapes[name]}"
            )
        return tensor.to(device=self._device, dtype=self._dtype)
