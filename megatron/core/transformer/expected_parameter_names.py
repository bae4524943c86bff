"""The parameter names of whole models, from their settings: what a checkpoint of each must hold. No tensors.

tests/ranks/convert/test_absent_tensors.py compares them with the parameters of built models.
"""

from collections.abc import Callable, Iterator, Mapping

from megatron.core.transformer.model_config import ModelConfig

_WEIGHT_AND_BIAS = ("weight", "bias")
_STAGE = "language_model."


def has_parameter(config: ModelConfig, name: str) -> bool:
    """Return whether a model of these settings has this parameter of its class.

    Not all models have each bias, norm and embedding.
    """
    module, part = ["", *name.split(".")][-2:]
    if module == "output_layer":
        return config.add_output_bias if part == "bias" else config.untie_embeddings_and_output_weights
    if module in ("q_layernorm", "k_layernorm") and not config.qk_layernorm:
        return False
    if module == "position_embeddings":
        return config.position_embedding_type == "learned_absolute"
    if module == "final_layernorm" and config.norm_placement == "post":
        return False
    if part == "softmax_offset":
        return config.softmax_type == "learnable"
    if part == "gate_weight":
        return config.moe_shared_expert_gate
    if module == "router":
        return part == "weight" or config.moe_router_bias
    if part != "bias":
        return True
    if "norm" in module:
        return config.normalization == "LayerNorm" and config.norm_bias
    if module in ("linear_qkv", "linear_q", "linear_kv"):
        return config.has_qkv_bias
    if module == "linear_proj":
        return config.has_proj_bias
    if module in ("linear_fc1", "linear_fc2"):
        return config.has_mlp_bias
    return True


def gpt_parameter_names(config: ModelConfig) -> list[str]:
    """Return the names of a GPT's parameters."""
    names = [*_embedding(config), *_stack(config, "decoder", config.num_layers), *_module("output_layer")]
    return _existing(config, names)


def bert_parameter_names(config: ModelConfig) -> list[str]:
    """Return the names of a BERT's parameters.

    The head of sentence order is among them, which --bert-no-binary-head leaves out.
    """
    embedding = [*_embedding(config), f"{_STAGE}embedding.tokentype_embeddings.weight"]
    heads = [f"{module}.{part}" for module in ("lm_head.dense", "lm_head.norm") for part in _WEIGHT_AND_BIAS] + [
        "word_bias.bias"
    ]
    heads += [f"{module}.{part}" for module in ("pooler.dense", "binary_head") for part in _WEIGHT_AND_BIAS]
    layers = _stack(config, "decoder", config.num_layers)
    return _existing(config, [*embedding, *layers, *_module("output_layer"), *heads])


def t5_parameter_names(config: ModelConfig) -> list[str]:
    """Return the names of a T5's parameters."""
    relative_positions = []
    if config.position_embedding_type == "relative":
        relative_positions = [f"{_STAGE}{stack}_relative_pos_emb.weight" for stack in ("encoder", "decoder")]
    encoder = _stack(config, "encoder", config.num_layers)
    decoder = _stack(config, "decoder", config.decoder_layers, has_cross_attention=True)
    names = [*_embedding(config), *relative_positions, *encoder, *decoder, *_module("output_layer")]
    return _existing(config, names)


# By the name of the model's class. The parameters of a fork's own model are not known here.
PARAMETER_NAMES: Mapping[str, Callable[[ModelConfig], list[str]]] = {
    "GPTModel": gpt_parameter_names,
    "BertModel": bert_parameter_names,
    "T5Model": t5_parameter_names,
}


def _existing(config: ModelConfig, names: list[str]) -> list[str]:
    return [name for name in names if has_parameter(config, name)]


def _module(name: str) -> list[str]:
    """Return the names of a module's weight and bias."""
    return [f"{_STAGE}{name}.{part}" for part in _WEIGHT_AND_BIAS]


def _embedding(config: ModelConfig) -> list[str]:
    names = [f"{_STAGE}embedding.{module}.weight" for module in ("word_embeddings", "position_embeddings")]
    if config.norm_placement == "post":
        names += _module("embedding.norm")
    return names


def _stack(config: ModelConfig, stack: str, num_layers: int, *, has_cross_attention: bool = False) -> list[str]:
    """Return the names of an encoder's or decoder's parameters: weights and biases first, then attention sinks."""
    names = []
    for i in range(num_layers):
        for module in _modules_of_layer(config, stack, i, has_cross_attention):
            names += _module(module)
        if config.is_moe_layer(i) and config.moe_shared_expert_intermediate_size is not None:
            names.append(f"{_STAGE}{stack}.layers.{i}.mlp.shared_experts.gate_weight")
    names += _module(f"{stack}.final_layernorm")
    names += [f"{_STAGE}{stack}.layers.{i}.self_attention.core_attention.softmax_offset" for i in range(num_layers)]
    return names


def _modules_of_layer(config: ModelConfig, stack: str, i: int, has_cross_attention: bool) -> Iterator[str]:
    layer = f"{stack}.layers.{i}."
    yield from (layer + norm for norm in config.layer_norms)
    yield from (f"{layer}self_attention.{x}" for x in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"))
    if has_cross_attention:
        yield f"{layer}pre_cross_attn_layernorm"
        yield from (f"{layer}cross_attention.{x}" for x in ("linear_q", "linear_kv", "linear_proj"))
    if not config.is_moe_layer(i):
        yield from (f"{layer}mlp.{x}" for x in ("linear_fc1", "linear_fc2"))
        return
    yield f"{layer}mlp.router"
    yield from (f"{layer}mlp.experts.{x}" for x in ("linear_fc1", "linear_fc2"))
    if config.moe_shared_expert_intermediate_size is not None:
        yield from (f"{layer}mlp.shared_experts.{x}" for x in ("linear_fc1", "linear_fc2"))
