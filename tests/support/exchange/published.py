"""Published models: what their config.json say, and the names and shapes of their tensors as transformers makes them.

    python tests/support/exchange/published.py            write published.json, with transformers in an environment of its own (4.57 or 5)
    python tests/support/exchange/published.py --check    compare with it

The models are made on the meta device, so that no weights are needed. Names that differ by the layer's number alone are one line of
the record, with the number of layers.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_suffix(".json")


def _llama(h: int, f: int, layers: int, heads: int, groups: int, words: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": h, "intermediate_size": f, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "llama", **sizes, "num_key_value_heads": groups, "vocab_size": words, **more}


_LLAMA_3 = {
    **{"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256}
_OLMO = {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": False}
_EXPERTS = {
    **{"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "output_router_logits": False},
    **{"tie_word_embeddings": False, "use_cache": True},
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}

# Values of sizes and options as the publishers' files have them; a key left out has the class's own value.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024},
        "vocab_size": 50257,
    },
    "pythia-70m": {
        **{"model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
        **{"num_attention_heads": 8, "vocab_size": 50304, "rotary_pct": 0.25, "rotary_emb_base": 10000},
        **{"use_parallel_residual": True, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    },
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096, rms_norm_eps=1e-5),
    "Llama-3.1-8B": _llama(
        *(4096, 14336, 32, 32, 8, 128256),
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        rope_scaling=_LLAMA_3 | {"factor": 8.0},
    ),
    "Llama-3.2-1B": _llama(
        *(2048, 8192, 16, 32, 8, 128256),
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 64},
        **{"tie_word_embeddings": True, "rope_scaling": _LLAMA_3 | {"factor": 32.0}},
    ),
    "Mistral-7B-v0.1": _llama(
        *(4096, 14336, 32, 32, 8, 32000),
        **{"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    ),
    "Qwen2.5-0.5B": _llama(
        *(896, 4864, 24, 14, 2, 151936),
        **{"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24},
    ),
    "Qwen3-0.6B": _llama(
        *(1024, 3072, 28, 16, 8, 151936),
        **{"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": True, "head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
    ),
    "gemma-2b": _llama(2048, 16384, 18, 8, 1, 256000, model_type="gemma", max_position_embeddings=8192, **_GEMMA),
    "gemma-2-2b": _llama(
        *(2304, 9216, 26, 8, 4, 256000),
        **{"model_type": "gemma2", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, **_GEMMA},
    ),
    "gemma-3-1b": _llama(
        *(1152, 6912, 26, 4, 1, 262144),
        **{"model_type": "gemma3_text", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000.0, **_GEMMA},
        rope_local_base_freq=10000.0,
    ),
    "phi-2": {
        **_llama(2560, 10240, 32, 32, 32, 51200, model_type="phi", max_position_embeddings=2048),
        **{"partial_rotary_factor": 0.4, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    },
    "Phi-3-mini-4k": _llama(
        *(3072, 8192, 32, 32, 32, 32064),
        **{"model_type": "phi3", "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        **{"sliding_window": 2047, "rms_norm_eps": 1e-5},
    ),
    "OLMo-2-7B": _llama(4096, 11008, 32, 32, 32, 100352, model_type="olmo2", max_position_embeddings=4096, **_OLMO),
    "Olmo-3-7B": _llama(
        *(4096, 11008, 32, 32, 32, 100278),
        **{"model_type": "olmo3", "max_position_embeddings": 65536, "sliding_window": 4096, **_OLMO},
        rope_scaling=_YARN | {"beta_slow": 1.0, "attention_factor": 1.2079441541679836},
    ),
    "SmolLM3-3B": _llama(
        *(2048, 11008, 36, 16, 4, 128256),
        **{"model_type": "smollm3", "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rms_norm_eps": 1e-6},
        **{"no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "starcoder2-3b": {
        **_llama(3072, 12288, 30, 24, 2, 49152, model_type="starcoder2", max_position_embeddings=16384),
        **{"sliding_window": 4096, "use_bias": True, "norm_epsilon": 1e-5, "rope_theta": 999999.4420358813},
    },
    "granite-3.0-2b": _llama(
        *(2048, 8192, 40, 32, 8, 49155),
        **{"model_type": "granite", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
        **{"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
        **{"logits_scaling": 8.0, "tie_word_embeddings": True},
    ),
    "command-r-35b": {
        **_llama(8192, 22528, 40, 64, 64, 256000, model_type="cohere", max_position_embeddings=8192),
        **{"layer_norm_eps": 1e-5, "rope_theta": 8000000.0, "logit_scale": 0.0625, "use_qk_norm": False},
    },
    "Mixtral-8x7B-v0.1": {
        **_llama(4096, 14336, 32, 32, 8, 32000, model_type="mixtral", max_position_embeddings=32768),
        **_EXPERTS | {"num_experts_per_tok": 2, "num_local_experts": 8, "router_aux_loss_coef": 0.02},
        **{"rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "bos_token_id": 1, "eos_token_id": 2},
    },
    "Qwen1.5-MoE-A2.7B": {
        **_llama(2048, 5632, 24, 16, 16, 151936, model_type="qwen2_moe", max_position_embeddings=8192),
        **_EXPERTS | {"num_experts_per_tok": 4, "num_experts": 60, "router_aux_loss_coef": 0.001},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        **{"norm_topk_prob": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768},
        **{"use_sliding_window": False, "max_window_layers": 21, "bos_token_id": 151643, "eos_token_id": 151643},
    },
    "Qwen3-30B-A3B": {
        **_llama(2048, 6144, 48, 32, 4, 151936, model_type="qwen3_moe", max_position_embeddings=40960),
        **_EXPERTS | {"num_experts_per_tok": 8, "num_experts": 128, "router_aux_loss_coef": 0.001},
        **{"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
        **{
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "sliding_window": None,
        },
        **{"attention_bias": False, "use_sliding_window": False, "max_window_layers": 48},
    },
    "OLMoE-1B-7B-0924": {
        **_llama(2048, 1024, 16, 16, 16, 50304, model_type="olmoe", max_position_embeddings=4096),
        **_EXPERTS | {"num_experts_per_tok": 8, "num_experts": 64, "router_aux_loss_coef": 0.01},
        **{"norm_topk_prob": False, "clip_qkv": None, "attention_bias": False, "rope_theta": 10000.0},
        **{"rms_norm_eps": 1e-5, "rope_scaling": None, "eos_token_id": 50279, "pad_token_id": 1},
    },
    "FlexOlmo-7x7B-1T": {
        **_llama(4096, 11008, 32, 32, 32, 100352, model_type="flex_olmo", max_position_embeddings=4096),
        **_EXPERTS | _OLMO | {"num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False},
        **{"attention_bias": False, "rope_scaling": None, "eos_token_id": 100257, "pad_token_id": 100277},
    },
    "granite-3.0-1b-a400m": {
        **_llama(1024, 512, 24, 16, 8, 49155, model_type="granitemoe", max_position_embeddings=4096),
        **_EXPERTS | {"num_experts_per_tok": 8, "num_local_experts": 32, "router_aux_loss_coef": 0.0},
        **{"rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None, "attention_bias": False},
        **{"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
        **{"logits_scaling": 6.0, "tie_word_embeddings": True, "attention_dropout": 0.1},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    },
    "gpt-oss-20b": {
        **_llama(2880, 2880, 24, 64, 8, 201088, model_type="gpt_oss", max_position_embeddings=131072),
        **_EXPERTS | {"num_experts_per_tok": 4, "experts_per_token": 4, "num_local_experts": 32},
        **{"router_aux_loss_coef": 0.9, "head_dim": 64, "attention_bias": True, "sliding_window": 128},
        **{"swiglu_limit": 7.0, "initial_context_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 150000},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": _YARN
        | {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_slow": 1.0, "truncate": False},
        "quantization_config": {
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
            "quant_method": "mxfp4",
        },
        **{"eos_token_id": 200002, "pad_token_id": 199999},
    },
    "bert-base": {
        **{"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522},
        **{"hidden_act": "gelu", "layer_norm_eps": 1e-12, "position_embedding_type": "absolute"},
    },
    "t5-small": {
        **{"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
        **{"vocab_size": 32128, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu"},
    },
}


def tensors_of(name: str) -> dict[str, list[int]]:
    """Names and shapes of a recorded model's tensors."""
    found = {}
    for pattern, (shape, layers, *experts) in json.loads(RECORD.read_text())["models"][name].items():
        for e in range(*(experts or [1])):
            found |= {pattern.replace("{i}", str(i)).replace("{e}", str(e)): shape for i in range(layers)}
    return found


def made_by_transformers(config: dict[str, Any]) -> dict[str, list]:
    """pattern -> [shape, number of layers], of a model on the meta device; a tied head is no tensor of its own."""
    import torch
    import transformers

    kinds = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForPreTraining}
    kind = kinds.get(config["model_type"], transformers.AutoModelForCausalLM)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(**config))
    model.tie_weights()
    mixtral = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    granite = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    granite["router.weight"] = "router.layer.weight"
    found: dict[str, list] = {}
    for name, parameter in model.named_parameters():
        if config["model_type"] not in ("gpt_oss", "granitemoe") and name.endswith(
            ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        ):
            found |= _of_experts(re.sub(r"\.\d+\.", ".{i}.", name, count=1), parameter.shape, found)
            continue
        if config["model_type"] == "gpt_neox":  # of the folder; version 5 has another name for the module
            name = name.replace("lm_head", "embed_out")
        pattern = re.sub(r"\.\d+\.", ".{i}.", name, count=1)
        shape = list(parameter.shape)
        if expert := re.search(r"experts\.(\d+)\.", pattern):  # version 4 has a module for each
            pattern = pattern.replace(expert[0], "experts.{e}.")
            line = found.setdefault(pattern, [shape, 0, 0])
            line[2] = max(line[2], int(expert[1]) + 1)
        else:
            line = found.setdefault(pattern, [shape, 0])
        if line[0] != shape:
            raise ValueError(f"{name} has another shape than layers before it")
        line[1] += not expert or expert[1] == "0"
    if config["model_type"] == "granitemoe":
        found = {re.sub("|".join(granite), lambda match: granite[match[0]], name): line for name, line in found.items()}
    if config["model_type"] == "mixtral":
        found = {re.sub("|".join(mixtral), lambda match: mixtral[match[0]], name): line for name, line in found.items()}
    return found


def _of_experts(name: str, shape: Any, found: dict[str, list]) -> dict[str, list]:
    """The tensors of a folder, [shape, number of layers, number of experts], for one that version 5 has stacked."""
    experts, rows, columns = shape
    kinds = {"down_proj": [rows, columns]}
    if name.endswith("gate_up_proj"):
        kinds = {kind: [rows // 2, columns] for kind in ("gate_proj", "up_proj")}
    stem = name.rsplit(".", 1)[0]
    lines = {f"{stem}.{{e}}.{kind}.weight": [size, 0, experts] for kind, size in kinds.items()}
    return {key: [line[0], found.get(key, line)[1] + 1, experts] for key, line in lines.items()}


def main(words: list[str]) -> int:
    import transformers

    models, wrong = {name: made_by_transformers(config) for name, config in CONFIGS.items()}, 0
    if "--check" in words:
        kept = json.loads(RECORD.read_text())["models"]
        wrong = sum(models[name] != kept[name] for name in CONFIGS)
        print(f"transformers {transformers.__version__}: {len(models)} models, {wrong} differ from the record")
    else:
        lines = [f"{json.dumps(name)}: {json.dumps(tensors)}" for name, tensors in models.items()]
        head = f'{{"versions": {{"transformers": "{transformers.__version__}"}}, "models": {{\n'
        RECORD.write_text(head + ",\n".join(lines) + "\n}}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
