"""Our initial weights for the peers: all contenders start from the same weights, so that losses can be compared.

A peer builds our model on the CPU, where each parameter is drawn by its name, and copies the parameters to its own
names.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from tools.benchmarking.batches import SEED
from tools.benchmarking.work import FAMILIES, Work

NamedTensors = Iterator[tuple[str, Tensor]]


def our_weights(work: Work) -> dict[str, Tensor]:
    """Return every parameter of our model by name, in its full shape, float32. Every rank must call."""
    settings = dict(FAMILIES[work.family])
    settings["add_bias_linear"] = not settings.pop("disable_bias_linear", False)
    config = ModelConfig(
        num_layers=work.num_layers,
        hidden_size=work.hidden_size,
        num_attention_heads=work.num_attention_heads,
        num_query_groups=work.num_query_groups or 1,
        ffn_hidden_size=work.ffn_hidden_size,
        make_vocab_size_divisible_by=work.padded_vocab_size,
        **settings,
    )
    mesh = parallel_state.initialize_model_parallel()
    model_class = BertModel if work.family == "bert" else GPTModel
    model = model_class(
        config,
        vocab_size=work.vocab_size,
        positions=work.seq_length,
        layers=range(work.num_layers),
        context=LayerContext.from_mesh(mesh, torch.float32, fills=False),
    )
    initialize_parameters(model, SEED, mesh)
    return {name.removeprefix("language_model."): value.detach() for name, value in model.named_parameters()}


def queries_keys_values(fused: Tensor, work: Work) -> tuple[Tensor, ...]:
    """Split our fused weight or bias into those of all queries, all keys and all values.

    fused: [(n + 2 groups) d, ..] -> [n d, ..], [groups d, ..] twice. The rows of `fused` are in groups: the queries of
    a group, its key and its value.
    """
    heads_per_group = work.num_attention_heads // work.kv_heads
    width = work.hidden_size // work.num_attention_heads
    groups = fused.view(work.kv_heads, heads_per_group + 2, width, *fused.shape[1:])
    return tuple(part.flatten(0, 2) for part in groups.split([heads_per_group, 1, 1], dim=1))


# Our names -> those of `PlainModel`: of modules in a layer, and of the others.
_IN_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp.down",
}
_OUTSIDE_LAYERS = {
    "embedding.word_embeddings": "words",
    "embedding.position_embeddings": "positions",
    "embedding.tokentype_embeddings": "types",
    "decoder.final_layernorm": "norm",
    "output_layer": "scores",
    "lm_head.dense": "heads.transform",
    "lm_head.norm": "heads.norm",
    "pooler.dense": "heads.pooler",
    "binary_head": "heads.order",
}


def as_plain(ours: dict[str, Tensor], work: Work) -> dict[str, Tensor]:
    """Return our weights under the names of `PlainModel`, both of its fused and of its separate matrices.

    ours: of `our_weights`. A matrix is [out, in], a bias [out].
    """
    result = {}
    for name, value in ours.items():
        result.update(_plain_names(name, value, work))
    return result


def _plain_names(name: str, value: Tensor, work: Work) -> NamedTensors:
    """Yield one of our parameters under the names of `PlainModel`."""
    module, kind = name.rsplit(".", 1)  # kind: weight or bias
    if module == "word_bias":
        yield "heads.word_bias", value
    elif module in _OUTSIDE_LAYERS:
        yield f"{_OUTSIDE_LAYERS[module]}.{kind}", value
        if module == "embedding.word_embeddings" and work.family != "llama":
            yield "scores.weight", value  # tied
    else:
        layer, module = module.removeprefix("decoder.layers.").split(".", 1)
        yield from _plain_names_in_layer(f"blocks.{layer}", module, kind, value, work)


def _plain_names_in_layer(block: str, module: str, kind: str, value: Tensor, work: Work) -> NamedTensors:
    if module in _IN_LAYER:
        yield f"{block}.{_IN_LAYER[module]}.{kind}", value
        return
    if module == "self_attention.linear_qkv":
        plain_module = "attention.qkv"
        parts = queries_keys_values(value, work)
    elif module == "mlp.linear_fc1":
        plain_module = "mlp.up"
        parts = value.chunk(2 if work.shape.gated else 1)
    else:
        raise KeyError(module)
    yield f"{block}.{plain_module}.fused.{kind}", torch.cat(parts)
    for i, part in enumerate(parts):
        yield f"{block}.{plain_module}.{i}.{kind}", part


def load_plain(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy `as_plain` weights into a `PlainModel`, or a stage of it, before it is wrapped.

    Of several candidates a parameter gets the one of its shape.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # qkv.0 is the matrix of the queries, or a fused one; the shape tells which
            fused_name = name.replace(".qkv.0.", ".qkv.fused.").replace(".up.0.", ".up.fused.")
            candidates = [weights[key] for key in (name, fused_name) if key in weights]
            parameter.copy_(next(value for value in candidates if value.shape == parameter.shape))
