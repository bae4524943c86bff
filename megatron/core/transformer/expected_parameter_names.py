"""The names of a model's parameters, as its settings have them: what a checkpoint of it must hold. Whole models; no tensors.

tests/ranks/convert/test_absent_tensors.py compares them with the parameters of the models that are built.
"""

from collections.abc import Callable, Iterator, Mapping

from megatron.core.transformer.model_config import ModelConfig

_BOTH = ("weight", "bias")
_STAGE = "language_model."


def has_parameter(config: ModelConfig, name: str) -> bool:
    """Whether a model of these settings has a parameter that some models of its class lack: a bias, a norm, a table."""
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
    if part != "bias":
        return True
    if "norm" in module:
        return config.normalization == "LayerNorm" and config.norm_bias
    if module in ("linear_qkv", "linear_q", "linear_kv"):
        return config.has_qkv_bias
    if module == "linear_proj":
        return config.has_proj_bias
    return config.has_mlp_bias if module in ("linear_fc1", "linear_fc2") else True


def names_of_gpt(config: ModelConfig) -> list[str]:
    return _that_it_has(
        config, _embedding(config), _stack(config, "decoder", config.num_layers), _module("output_layer")
    )


def names_of_bert(config: ModelConfig) -> list[str]:
    """With the head of sentence order, which --bert-no-binary-head leaves out."""
    embedding = [*_embedding(config), f"{_STAGE}embedding.tokentype_embeddings.weight"]
    heads = [f"{module}.{part}" for module in ("lm_head.dense", "lm_head.norm") for part in _BOTH] + ["word_bias.bias"]
    heads += [f"{module}.{part}" for module in ("pooler.dense", "binary_head") for part in _BOTH]
    return _that_it_has(config, embedding, _stack(config, "decoder", config.num_layers), _module("output_layer"), heads)


def names_of_t5(config: ModelConfig) -> list[str]:
    tables = [f"{_STAGE}{stack}_relative_pos_emb.weight" for stack in ("encoder", "decoder")]
    return _that_it_has(
        config,
        _embedding(config),
        tables if config.position_embedding_type == "relative" else [],
        _stack(config, "encoder", config.num_layers),
        _stack(config, "decoder", config.decoder_layers, looks_at_encoder=True),
        _module("output_layer"),
    )


# By the name of the model's class. A model of a fork is not here, and nobody knows its parameters but itself.
PARAMETER_NAMES: Mapping[str, Callable[[ModelConfig], list[str]]] = {
    "GPTModel": names_of_gpt,
    "BertModel": names_of_bert,
    "T5Model": names_of_t5,
}


def _that_it_has(config: ModelConfig, *parts: list[str]) -> list[str]:
    return [name for part in parts for name in part if has_parameter(config, name)]


def _module(name: str) -> list[str]:
    return [f"{_STAGE}{name}.{part}" for part in _BOTH]


def _embedding(config: ModelConfig) -> list[str]:
    tables = [f"{_STAGE}embedding.{table}.weight" for table in ("word_embeddings", "position_embeddings")]
    return tables + (_module("embedding.norm") if config.norm_placement == "post" else [])


def _stack(config: ModelConfig, stack: str, layers: int, *, looks_at_encoder: bool = False) -> list[str]:
    modules = [
        name for i in range(layers) for name in _modules_of_layer(config, f"{stack}.layers.{i}.", looks_at_encoder)
    ]
    sinks = [f"{_STAGE}{stack}.layers.{i}.self_attention.core_attention.softmax_offset" for i in range(layers)]
    return [*(name for module in [*modules, f"{stack}.final_layernorm"] for name in _module(module)), *sinks]


def _modules_of_layer(config: ModelConfig, layer: str, looks_at_encoder: bool) -> Iterator[str]:
    yield from (layer + norm for norm in config.layer_norms)
    yield from (f"{layer}self_attention.{x}" for x in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"))
    if looks_at_encoder:
        yield f"{layer}pre_cross_attn_layernorm"
        yield from (f"{layer}cross_attention.{x}" for x in ("linear_q", "linear_kv", "linear_proj"))
    yield from (f"{layer}mlp.{x}" for x in ("linear_fc1", "linear_fc2"))
