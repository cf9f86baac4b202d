"""Writes tiny random checkpoints: folders as Hugging Face lays them out, and GGUF files of the same weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 2, 4, 2, 8
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_tiny(
    folder: Path, family: str = "llama", *, seed: int = 0, shards: int = 1, tied: bool = False, **settings: Any
) -> Path:
    """A checkpoint of two narrow layers with a byte-level tokenizer; `settings` go into config.json as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder)
    head_dim = settings.get("head_dim", 16 if family == "qwen3" else HEAD_DIM)
    config = {
        "architectures": [ARCHITECTURES[family]], "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": vocabulary, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": tied, "hidden_act": "silu", "eos_token_id": vocabulary - 1,
    }  # fmt: skip
    if family == "qwen3":
        config["head_dim"] = head_dim
    (folder / "config.json").write_text(json.dumps(config | settings))
    biased = settings.get("attention_bias", False)
    tensors = _tensors(
        family, seed, vocabulary, head_dim, tied=tied, qkv_bias=biased or family == "qwen2", o_bias=biased
    )
    _save(folder, tensors, shards)
    return folder


def _tensors(
    family: str, seed: int, vocabulary: int, head_dim: int, *, tied: bool, qkv_bias: bool, o_bias: bool
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": random(vocabulary, HIDDEN), "model.norm.weight": 1 + random(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = random(vocabulary, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = random(heads * head_dim, HIDDEN)
            if qkv_bias:
                tensors[f"{at}.self_attn.{name}_proj.bias"] = random(heads * head_dim)
        tensors[f"{at}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * head_dim)
        if o_bias:
            tensors[f"{at}.self_attn.o_proj.bias"] = random(HIDDEN)
        if family == "qwen3":
            tensors[f"{at}.self_attn.q_norm.weight"] = 1 + random(head_dim)
            tensors[f"{at}.self_attn.k_norm.weight"] = 1 + random(head_dim)
        tensors[f"{at}.mlp.gate_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        tensors[f"{at}.mlp.up_proj.weight"] = random(INTERMEDIATE, HIDDEN)
        tensors[f"{at}.mlp.down_proj.weight"] = random(HIDDEN, INTERMEDIATE)
        tensors[f"{at}.input_layernorm.weight"] = 1 + random(HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = 1 + random(HIDDEN)
    return tensors


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    placed: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file)
        placed.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def _write_tokenizer(folder: Path) -> int:
    """Bytes and two special tokens; the size of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return made.get_vocab_size()


_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GGUF_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
}


def write_tiny_gguf(
    path: Path, folder: Path, architecture: str = "llama", *, quantised: bool = False, **fields: float | str
) -> Path:
    """The weights of a folder from `write_tiny` as GGUF; architecture "llama" gets its q and k rows interleaved.

    `quantised` stores the matrices as Q8_0.  `fields` are further metadata below the architecture's name.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        else:
            writer.add_float32(f"{architecture}.{key}", value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = _interleaved(values, HEADS if ".q_proj." in name else KV_HEADS)
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{kind}"


def _interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of each head, then row i of the second half, and so on."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        block = rows[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = block[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = block[size // 2 :]
    return out
