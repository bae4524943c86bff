"""Tiny models of published families: config.json's fields, and the same by our settings; odd sizes, every option on.

`record_families.py` writes what transformers computes of them, `tests/ranks/convert/test_families.py` compares.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np

VOCAB, LENGTH = 29, 14  # texts are longer than windows, and than the contexts that scalings begin at
TOKENS = [[(7 * i * i + 3 * i + text) % VOCAB for i in range(LENGTH)] for text in (1, 5)]


class Family(NamedTuple):
    """architecture: the class in transformers. theirs: fields of config.json, beside `SIZES`. ours: settings."""

    architecture: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


def value_of(name: str, shape: tuple[int, ...], *, plus: bool = False) -> np.ndarray:
    """Values of one of our parameters: std 0.3, norms' weights in 1 +- 0.5 (less 1 if the model adds it)."""
    drawn = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()))).random(shape) - 0.5
    return drawn + (0 if plus else 1) if name.endswith("norm.weight") else drawn * (0.3 * 12**0.5)


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
_SHAPE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fp64": True,
}
_GROUPS = {"group_query_attention": True, "num_query_groups": 2}
_ROPE = {"position_embedding_type": "rope"}
_OWN_HEAD = {"untie_embeddings_and_output_weights": True}
_NO_BIAS = {"add_bias_linear": False}
_RMS = {"normalization": "RMSNorm", "norm_epsilon": 1e-6}
_LLAMA = _GROUPS | _ROPE | _OWN_HEAD | _NO_BIAS | _RMS | {"swiglu": True}
_TIED = {name: value for name, value in _LLAMA.items() if name not in _OWN_HEAD}
_GEMMA = {name: value for name, value in _TIED.items() if name != "swiglu"}
_GEMMA |= {"gated": True, "apply_layernorm_1p": True, "kv_channels": 12, "embedding_multiplier": 32**0.5}
_WIDE = {"head_dim": 12}


def _pattern(*windows: int) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention" if on else "full_attention" for on in windows], "sliding_window": 5}


def _windows(*on: int) -> dict[str, Any]:
    """`sliding_window` counts the query's own key; --window-size those before it."""
    return {"window_size": "4,0", "window_attn_skip_freq": str(list(on)).replace(" ", "")}


def _scaled(kind: str, base: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **numbers}}


_LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 0.5}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}


def _json(kind: str, **numbers: Any) -> dict[str, str]:
    import json

    return {"rope_scaling": json.dumps({"rope_type": kind, **numbers})}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"n_inner": 40, "activation_function": "gelu_new", "scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {"rotary_pct": 0.5, "use_parallel_residual": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}},
        _ROPE
        | _OWN_HEAD
        | {"rotary_percent": 0.5, "rotary_base": 5000.0, "norm_placement": "parallel", "activation": "gelu"},
    ),
    "llama 2": Family("LlamaForCausalLM", _WIDE | {"rms_norm_eps": 1e-6}, _LLAMA | {"kv_channels": 12}),
    "llama with biases": Family(
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": False, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        _TIED | {"add_qkv_bias": True, "add_attention_output_bias": True},
    ),
    "llama 3.1": Family(
        "LlamaForCausalLM",
        _scaled("llama3", 5e5, **_LLAMA_3) | {"rms_norm_eps": 1e-5, "mlp_bias": True},
        _LLAMA | {"rotary_base": 5e5, "norm_epsilon": 1e-5, "add_mlp_bias": True} | _json("llama3", **_LLAMA_3),
    ),
    "llama, linear": Family(
        "LlamaForCausalLM", _scaled("linear", factor=3.0), _LLAMA | {"rotary_seq_len_interpolation_factor": 3.0}
    ),
    "llama, dynamic": Family(
        "LlamaForCausalLM",
        _scaled("dynamic", factor=3.0) | {"max_position_embeddings": 8},
        _LLAMA | _json("dynamic", factor=3.0, original_max_position_embeddings=8),
    ),
    "llama, yarn": Family("LlamaForCausalLM", _scaled("yarn", **_YARN), _LLAMA | _json("yarn", **_YARN)),
    "llama, yarn, not truncated": Family(
        "LlamaForCausalLM",
        _scaled("yarn", **_YARN, truncate=False, mscale=0.7, mscale_all_dim=0.3),
        _LLAMA | _json("yarn", **_YARN, truncate=False, mscale=0.7, mscale_all_dim=0.3),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"sliding_window": 5, "rms_norm_eps": 1e-6} | _WIDE,
        _LLAMA | {"kv_channels": 12, "window_size": "4,0"},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"rms_norm_eps": 1e-6, "use_sliding_window": True, "max_window_layers": 2} | _pattern(0, 0, 1, 1),
        _LLAMA | {"add_qkv_bias": True} | _windows(0, 0, 1, 1),
    ),
    "qwen3": Family("Qwen3ForCausalLM", _WIDE, _LLAMA | {"kv_channels": 12, "qk_layernorm": True}),
    "gemma": Family("GemmaForCausalLM", _WIDE | {"hidden_activation": None}, _GEMMA),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _WIDE
        | _pattern(1, 0, 1, 0)
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        _GEMMA
        | _windows(1, 0, 1, 0)
        | {"softmax_scale": 24**-0.5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        | {"norm_placement": "sandwich"},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _WIDE
        | _pattern(1, 1, 0, 1)
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        _GEMMA
        | _windows(1, 1, 0, 1)
        | {"softmax_scale": 24**-0.5, "norm_placement": "sandwich", "qk_layernorm": True, "rotary_base": 1e6}
        | {"rotary_base_of_windows": 1e4, "rotary_seq_len_interpolation_factor": 8.0},
    ),
    "phi": Family(
        "PhiForCausalLM",
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": True}
        | {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        _ROPE
        | _OWN_HEAD
        | {"rotary_percent": 0.5, "qk_layernorm": True, "norm_placement": "parallel-one-norm", "add_output_bias": True},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _scaled("longrope", **_LONG, original_max_position_embeddings=8)
        | {
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 64,
            "sliding_window": 5,
            "rms_norm_eps": 1e-6,
        }
        | {"pad_token_id": 0},
        _LLAMA | {"window_size": "4,0"} | _json("longrope", **_LONG, original_max_position_embeddings=8, factor=8.0),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-6},
        _LLAMA | {"norm_placement": "branch", "qk_layernorm": True, "qk_norm_over": "width"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"rms_norm_eps": 1e-6}
        | _pattern(1, 1, 1, 0)
        | {
            "rope_parameters": {
                "full_attention": _scaled("yarn", 5e5, **_YARN)["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
        _LLAMA
        | {"norm_placement": "branch", "qk_layernorm": True, "qk_norm_over": "width", "rotary_base": 5e5}
        | {"rotary_base_of_windows": 5e5}
        | _windows(1, 1, 1, 0)
        | _json("yarn", **_YARN),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0, 1, 0], "rms_norm_eps": 1e-6, "pad_token_id": 0, "tie_word_embeddings": True},
        _TIED | {"no_rope_freq": "[0,1,0,1]", "rotary_base": 2e6},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {"sliding_window": 5, "use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
        _GROUPS | _ROPE | {"window_size": "4,0"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 4.0}
        | {"rms_norm_eps": 1e-6},
        _LLAMA
        | {"embedding_multiplier": 3.0, "softmax_scale": 0.3, "residual_multiplier": 0.4, "logit_multiplier": 0.25},
    ),
    "cohere": Family(
        "CohereForCausalLM",
        {"logit_scale": 0.0625, "use_qk_norm": True, "layer_norm_eps": 1e-5} | _scaled("default", 5e5),
        {name: value for name, value in _TIED.items() if name not in _RMS}
        | {"norm_bias": False, "norm_placement": "parallel-one-norm", "rotary_interleaved": True, "rotary_base": 5e5}
        | {"logit_multiplier": 0.0625, "qk_layernorm": True, "qk_norm_over": "each-head"},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "head_dim": 8} | _pattern(1, 1, 1, 0),
        {name: value for name, value in _TIED.items() if name not in _RMS}
        | {
            "norm_bias": False,
            "norm_placement": "parallel-one-norm",
            "rotary_interleaved": True,
            "logit_multiplier": 0.25,
        }
        | {"no_rope_freq": "4"}
        | _windows(1, 1, 1, 0),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2", "head_dim": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        _GROUPS
        | _ROPE
        | _OWN_HEAD
        | _NO_BIAS
        | {"apply_layernorm_1p": True, "rotary_percent": 0.5, "activation": "squared-relu"},
    ),
}


def settings_of(family: Family) -> dict[str, Any]:
    """Of a ModelConfig."""
    return _SHAPE | family.ours
