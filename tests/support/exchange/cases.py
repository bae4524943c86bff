"""Tiny models of each family, with odd sizes and every option on: what `record.py` gives transformers, and the tests give us.

Weights are made from the names and shapes of a folder alone, so that a record needs to hold none.
"""

import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

SEED, LENGTH = 7, 14
_SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
_BASE = _SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}
_GPT2 = {"vocab_size": 31, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 16, "layer_norm_epsilon": 1e-4}

_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4, "beta_fast": 2.0}
_LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 7.0], "original_max_position_embeddings": 8}
_GEMMA = _BASE | {"head_dim": 6, "pad_token_id": None}

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gpt2-untied": {
        **{"model_type": "gpt2", **_GPT2, "n_inner": 36, "tie_word_embeddings": False},
        **{"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    },
    "llama": {"model_type": "llama", **_BASE},
    "llama-tied": {"model_type": "llama", **_BASE, "tie_word_embeddings": True, "head_dim": 6, "rope_theta": 5e5},
    "llama-biases": {"model_type": "llama", **_BASE, "attention_bias": True, "mlp_bias": True},
    "llama3": {
        "model_type": "llama",
        **_BASE,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **_LLAMA3},
    },
    "llama-linear": {
        **{"model_type": "llama", **_BASE},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "llama-dynamic": {
        **{"model_type": "llama", **_BASE, "max_position_embeddings": 8},
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    },
    "llama-yarn": {"model_type": "llama", **_BASE, "rope_parameters": _YARN},
    "llama-yarn-mscale": {
        **{"model_type": "llama", **_BASE},
        "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
    },
    "mistral": {"model_type": "mistral", **_BASE, "sliding_window": 5, "head_dim": 6},
    "qwen2": {"model_type": "qwen2", **_BASE},
    "qwen2-window": {
        "model_type": "qwen2",
        **_BASE,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_BASE, "head_dim": 6, "attention_bias": True},
    "gemma": {"model_type": "gemma", **_GEMMA},
    "gemma2": {
        **{"model_type": "gemma2", **_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 9},
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    },
    "gemma3": {
        **{"model_type": "gemma3_text", **_GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 9},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt_neox": {
        **{"model_type": "gpt_neox", **_SIZES, "max_position_embeddings": 32, "layer_norm_eps": 1e-4},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt_neox-serial": {
        **{"model_type": "gpt_neox", **_SIZES, "max_position_embeddings": 32, "use_parallel_residual": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
        "hidden_act": "gelu_new",
    },
    "phi": {
        **{"model_type": "phi", **_SIZES, "max_position_embeddings": 32, "num_key_value_heads": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi-norms": {
        **{"model_type": "phi", **_SIZES, "max_position_embeddings": 32, "qk_layernorm": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3": {"model_type": "phi3", **_BASE, "sliding_window": 5, "pad_token_id": None},
    "phi3-long": {
        **{"model_type": "phi3", **_BASE, "pad_token_id": None, "original_max_position_embeddings": 8},
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **_LONG},
    },
    "olmo2": {"model_type": "olmo2", **_BASE, "pad_token_id": None},
    "olmo3": {
        **{"model_type": "olmo3", **_BASE, "pad_token_id": None, "sliding_window": 5},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": _YARN | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "smollm3": {"model_type": "smollm3", **_BASE, "no_rope_layers": [1, 0, 1], "pad_token_id": None},
    "starcoder2": {
        **{"model_type": "starcoder2", **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32},
        **{"sliding_window": 5, "norm_epsilon": 1e-4},
    },
    "granite": {
        **{"model_type": "granite", **_BASE, "embedding_multiplier": 1.5, "attention_multiplier": 0.3},
        **{"residual_multiplier": 0.7, "logits_scaling": 3.0},
    },
    "cohere": {"model_type": "cohere", **_SIZES, "num_key_value_heads": 2, "logit_scale": 0.5, "pad_token_id": None},
    "cohere-norms": {
        "model_type": "cohere",
        **_SIZES,
        "num_key_value_heads": 2,
        "use_qk_norm": True,
        "pad_token_id": None,
    },
    "cohere2": {
        **{"model_type": "cohere2", **_SIZES, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": None},
        **{"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
    # Mixtures of experts.
    "mixtral": {
        **{"model_type": "mixtral", **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20},
        **{"sliding_window": 5, "head_dim": 6, "rope_theta": 1e4},
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", **_BASE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        **{"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": False},
    },
    "qwen2_moe-window": {
        **{"model_type": "qwen2_moe", **_BASE, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"shared_expert_intermediate_size": 28, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
        **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    },
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", **_BASE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
        **{"norm_topk_prob": True, "head_dim": 6, "attention_bias": True, "mlp_only_layers": [0]},
    },
    "olmoe": {
        **{"model_type": "olmoe", **_BASE, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12},
        **{"norm_topk_prob": False, "pad_token_id": None, "eos_token_id": None, "clip_qkv": 0.9},
    },
    "flex_olmo": {
        **{"model_type": "flex_olmo", **_BASE, "num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 12},
        **{"norm_topk_prob": False, "attention_bias": True, "pad_token_id": None, "eos_token_id": None},
    },
    "granitemoe": {
        **{"model_type": "granitemoe", **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"intermediate_size": 12, "tie_word_embeddings": True, "embedding_multiplier": 1.5},
        **{"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    },
    "granitemoeshared": {
        **{"model_type": "granitemoeshared", **_BASE, "num_local_experts": 6, "num_experts_per_tok": 3},
        **{"intermediate_size": 12, "shared_intermediate_size": 20, "attention_bias": True},
        **{"embedding_multiplier": 1.5, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
        **{"head_dim": 6, "sliding_window": 5, "swiglu_limit": 0.5, "pad_token_id": None},
        "rope_parameters": _YARN | {"rope_theta": 1.5e5, "truncate": False},
    },
}


_T5 = {
    **{"model_type": "t5", "vocab_size": 31, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_heads": 6},
    **{"num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 7},
    "dropout_rate": 0.0,
}
# Two stacks: with texts of `texts`.
T5_CASES: dict[str, dict[str, Any]] = {
    "t5": {**_T5, "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-4},
    "t5-gated": {
        **{**_T5, "feed_forward_proj": "gated-gelu", "d_kv": 4},
        **{"tie_word_embeddings": False, "scale_decoder_outputs": False},
    },
    # Version 1.1 as transformers 5 makes it.
    "t5-tied": {
        **{**_T5, "feed_forward_proj": "gated-gelu"},
        **{"tie_word_embeddings": True, "scale_decoder_outputs": False},
    },
}

# Norms behind the blocks, and the heads of pretraining: with texts of `sentences`.
BERT_CASES: dict[str, dict[str, Any]] = {
    "bert": {
        **{"model_type": "bert", **_SIZES, "max_position_embeddings": 16, "layer_norm_eps": 1e-4, "pad_token_id": None},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    }
}


def sentences() -> dict[str, np.ndarray]:
    """Two samples: ids, padding, parts, what masked words should say [2, 14], which are masked, and the orders [2]."""
    draw, place = np.random.RandomState(SEED), np.arange(LENGTH)[None]
    seen = (place < np.array([[LENGTH], [9]])).astype(np.int64)
    return {
        **{"text": draw.randint(0, 31, (2, LENGTH)) * seen, "seen": seen, "asked": draw.randint(0, 31, (2, LENGTH))},
        **{"types": (place > np.array([[5], [3]])) * seen, "masked": (place % 3 == np.array([[0], [2]])) * seen},
        "order": np.array([1, 0]),
    }


# Of generation: prompts of several lengths in one batch, and how many ids follow; a text leaves its window on the way.
_PROMPTS, _NEW = (3, 11, 7), 14
_OTHER_PROMPTS = {
    **dict.fromkeys(("gpt2", "gpt2-untied"), ((2, 6, 4), 10)),  # 16 positions
    # Its frequencies depend on the length: transformers' on that of each step, ours on that which the text may reach.
    "llama-dynamic": ((2, 4, 3), 4),
    "phi3-long": ((9, 13, 11), 14),  # from the first id on longer than the length after which the factors change
}


def prompts(case: str) -> tuple[list[list[int]], int]:
    """(prompts, ids that follow each)."""
    lengths, new = _OTHER_PROMPTS.get(case, (_PROMPTS, _NEW))
    draw = np.random.RandomState(SEED + 1)
    return [draw.randint(0, 31, length).tolist() for length in lengths], new


def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of two samples: the encoder's ids [2, 14] and 0 at its padding, the decoder's ids [2, 10] and what it should say."""
    draw = np.random.RandomState(SEED)
    encoder, asked = draw.randint(1, 31, (2, LENGTH)), draw.randint(1, 31, (2, 10))
    seen = np.arange(LENGTH)[None] < np.array([[LENGTH], [9]])
    return encoder * seen, seen.astype(np.int64), np.concatenate((np.zeros_like(asked[:, :1]), asked[:, :-1]), 1), asked


def ids() -> np.ndarray:
    """Two texts, [2, LENGTH]."""
    return np.random.RandomState(SEED).randint(0, 31, (2, LENGTH))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal with deviation 0.3, norms around 1: small weights would hide a wrong option. In float32, which files can hold."""
    x = np.random.RandomState(zlib.crc32(name.encode()) ^ SEED).standard_normal(shape)
    is_norm = name.endswith(".weight") and len(shape) == 1
    return (1 + 0.5 * x if is_norm else 0.3 * x).astype(np.float32).astype(np.float64)


def read_record(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "records" / f"{name}.json").read_text())


def write_folders(root: Path, names: Iterable[str]) -> dict[str, Path]:
    """The folder of each recorded case, of float64, below `root`."""
    for name in names:
        write_folder(root / name, read_record(name))
    return {name: root / name for name in names}


def write_folder(root: Path, record: dict[str, Any], dtype: str = "F64") -> None:
    """The folder that transformers would write: its config.json, and its tensors in two files with an index.

    Written here and not by the product, which is to be tested.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(record["config"]))
    write_tensors(root, {name: weight(name, tuple(shape)) for name, shape in record["shapes"].items()}, dtype)


def write_tensors(root: Path, values: dict[str, np.ndarray], dtype: str = "F64") -> None:
    """Tensors by name, in two files with an index."""
    names = sorted(values)
    halves = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in halves.items():
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for tensor in part:
            content = bytes_of(values[tensor], dtype)
            offsets = [len(data), len(data) + len(content)]
            header[tensor] = {"dtype": dtype, "shape": list(values[tensor].shape), "data_offsets": offsets}
            data += content
        text = json.dumps(header).encode()
        (root / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
    index = {"metadata": {}, "weight_map": {tensor: file for file, part in halves.items() for tensor in part}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def bytes_of(values: np.ndarray, dtype: str) -> bytes:
    if dtype != "BF16":
        return values.astype({"F64": "<f8", "F32": "<f4"}[dtype]).tobytes()
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()  # to the nearest, ties to even


def read_tensors(root: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """(dtype, shape, bytes) of each tensor of a folder, by name."""
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[8 + length + start : 8 + length + stop]
    return found
