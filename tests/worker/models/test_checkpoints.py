"""Opening checkpoints: both formats give the same model, and what is not supported is refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.gguf_file import GGUFError
from serving.model_files import resolve_model
from serving.tokenizer import load_tokenizer
from worker.models import Model, ModelConfig, ModelLoadError, load_model

from .reference import plain_angles, reference_of_folder
from .stepping import Stepper
from .tiny import write_tiny, write_tiny_gguf

PROMPT = [5, 17, 200, 3, 3, 90, 41, 8, 77, 120, 31]
DIFFERENCE = 1e-4


def last_logits(model: Model) -> torch.Tensor:
    stepper = Stepper(model)
    stepper.add(stepper.request(0, PROMPT))
    stepper.step()
    return stepper.logits[0][0]


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_smollm2_has_the_shape_that_its_file_says() -> None:
    stages: list[tuple[str, float]] = []
    model = load_model(resolve_model("smollm2"), progress=lambda stage, fraction: stages.append((stage, fraction)))
    assert model.config == ModelConfig(
        architecture="llama", layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
        max_position=8192, rope_theta=100000.0, rope_scaling=None, norm_eps=pytest.approx(1e-5), tied_embeddings=True,
        qkv_bias=False, output_bias=False, qk_norm=False, dtype=torch.float32,
    )  # fmt: skip
    fractions = [fraction for _, fraction in stages]
    assert fractions == sorted(fractions)
    assert (fractions[0], stages[-1]) == (0.0, ("loaded", 1.0))
    shape = model.transformer_config()
    assert (shape.num_layers, shape.num_query_groups, shape.kv_channels) == (30, 3, 64)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_model_of_the_folder(tmp_path: Path, family: str) -> None:
    folder = write_tiny(tmp_path / "model", family)
    model = load_model(write_tiny_gguf(tmp_path / "model.gguf", folder, family))
    torch.testing.assert_close(last_logits(model), last_logits(load_model(folder)))


def test_quantised_tensors_are_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    model = load_model(write_tiny_gguf(tmp_path / "model.gguf", folder, quantised=True))
    exact, rounded = last_logits(load_model(folder)), last_logits(model)
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.995


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (3, False), (3, True)])
def test_sharded_and_tied_checkpoints_equal_the_reference(tmp_path: Path, shards: int, tied: bool) -> None:
    folder = write_tiny(tmp_path / "model", shards=shards, tied=tied)
    expected = reference_of_folder(folder).logits(PROMPT)[-1]
    assert (last_logits(load_model(folder)) - expected).abs().max() < DIFFERENCE


def test_biases_on_all_attention_projections_are_applied(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", attention_bias=True)
    expected = reference_of_folder(folder).logits(PROMPT)[-1]
    assert (last_logits(load_model(folder)) - expected).abs().max() < DIFFERENCE


def test_a_tokenizer_lies_in_the_same_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny(tmp_path / "model"))
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "user\nhi\n"
    assert tokenizer.vocab_size == load_model(tmp_path / "model").config.vocab


def llama3_angles(head_dim: int, theta: float) -> list[float]:
    """Frequencies by wavelength: short ones as they are, long ones by a factor 8, a slope between (Llama 3.1)."""
    angles = []
    for angle in plain_angles(head_dim, theta):
        wavelength = 2 * math.pi / angle
        if wavelength < 64 / 4.0:
            angles.append(angle)
        elif wavelength > 64 / 1.0:
            angles.append(angle / 8)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            angles.append((1 - smooth) * angle / 8 + smooth * angle)
    return angles


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "angles"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, [angle / 4 for angle in plain_angles(8, 10000.0)]),
        ({"rope_scaling": LLAMA3}, llama3_angles(8, 10000.0)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, llama3_angles(8, 500.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, plain_angles(8, 500.0)),
    ],
)
def test_scaled_rotations_equal_the_reference(tmp_path: Path, settings: dict[str, Any], angles: list[float]) -> None:
    folder = write_tiny(tmp_path / "model", **settings)
    expected = reference_of_folder(folder, angles).logits(PROMPT)[-1]
    assert (last_logits(load_model(folder)) - expected).abs().max() < DIFFERENCE


def test_frequency_factors_of_a_gguf_file_are_applied(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    factors = [1.0, 2.0, 4.0, 8.0]
    change_tensors(folder, lambda tensors: tensors.update({"rope_freqs.weight": torch.tensor(factors)}))
    path = write_tiny_gguf(tmp_path / "model.gguf", folder)
    angles = [angle / factor for angle, factor in zip(plain_angles(8, 10000.0), factors, strict=True)]
    expected = reference_of_folder(folder, angles).logits(PROMPT)[-1]
    assert (last_logits(load_model(path)) - expected).abs().max() < DIFFERENCE


def test_a_sliding_window_bounds_the_longest_sequence(tmp_path: Path) -> None:
    assert load_model(write_tiny(tmp_path / "a", "mistral", sliding_window=128)).config.max_position == 128
    folder = write_tiny(tmp_path / "b", "qwen2", sliding_window=128, use_sliding_window=False)
    assert load_model(folder).config.max_position == 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"\['GPT2LMHeadModel'\]; supported are LlamaForCausalLM, "),
        ({"architectures": None}, "supported are"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' is not supported; default, linear and llama3 are",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear'.*factor"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; a positive integer"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = write_tiny(tmp_path / "model")
    change_config(folder, **settings)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "1 unexpected: extra"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}), r"shape \(7,\), not \(32,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    folder = write_tiny(tmp_path / "model")
    change_tensors(folder, change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


def test_frequencies_stored_by_old_writers_and_repeated_tied_weights_do_not_matter(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", tied=True)
    expected = last_logits(load_model(folder))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, add)
    assert torch.equal(last_logits(load_model(folder)), expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "only safetensors are read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map is missing"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "not there: gone.safetensors",
        ),
    ],
)
def test_a_broken_folder_says_which_file(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    folder = write_tiny(tmp_path / "model")
    spoil(folder)
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)


def test_gguf_files_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model")
    path = tmp_path / "model.gguf"
    with pytest.raises(
        ModelLoadError, match="'gptneox' is not supported; supported in GGUF files are llama, qwen2, qwen3"
    ):
        load_model(write_tiny_gguf(path, folder, "gptneox"))
    with pytest.raises(ModelLoadError, match="'yarn' is not supported"):
        load_model(write_tiny_gguf(path, folder, **{gguf.Keys.Rope.SCALING_TYPE.split(".", 1)[1]: "yarn"}))
    with pytest.raises(ModelLoadError, match=r"missing: .*k_norm"):
        load_model(write_tiny_gguf(path, folder, "qwen3"))
    whole = write_tiny_gguf(path, folder).read_bytes()
    path.write_bytes(whole[:-4000])
    with pytest.raises(ModelLoadError, match="cut off"):
        load_model(path)
    path.write_bytes(b"junk" * 100)
    with pytest.raises(GGUFError, match="not a GGUF file"):
        load_model(path)
