"""Our initial weights, for the peers: every contender starts from the same ones, so that its losses can be compared.

A peer builds our model on the CPU, which draws each parameter by its name, and copies it under its own names.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.sharding.initial_values import initialize_parameters
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from tools.benchmarking.batches import SEED
from tools.benchmarking.work import FAMILIES, Work

Named = Iterator[tuple[str, Tensor]]


def our_weights(work: Work) -> dict[str, Tensor]:
    """Every parameter of our model by its name, in float32, whole. Every rank must call."""
    said = dict(FAMILIES[work.family])
    said["add_bias_linear"] = not said.pop("disable_bias_linear", False)
    config = ModelConfig(
        num_layers=work.num_layers,
        hidden_size=work.hidden_size,
        num_attention_heads=work.num_attention_heads,
        num_query_groups=work.num_query_groups or 1,
        ffn_hidden_size=work.ffn_hidden_size,
        make_vocab_size_divisible_by=work.padded_vocab_size,
        **said,
    )
    mesh = parallel_state.initialize_model_parallel()
    model = (BertModel if work.family == "bert" else GPTModel)(
        config,
        vocab_size=work.vocab_size,
        positions=work.seq_length,
        layers=range(work.num_layers),
        context=LayerContext.from_mesh(mesh, torch.float32, fills=False),
    )
    initialize_parameters(model, SEED, mesh)
    return {name.removeprefix("language_model."): value.detach() for name, value in model.named_parameters()}


def queries_keys_values(fused: Tensor, work: Work) -> tuple[Tensor, ...]:
    """The rows of our fused weight or bias, each group's queries, key and value together -> all queries, all keys, all values."""
    shared, width = work.num_attention_heads // work.kv_heads, work.hidden_size // work.num_attention_heads
    groups = fused.view(work.kv_heads, shared + 2, width, *fused.shape[1:])
    return tuple(part.flatten(0, 2) for part in groups.split([shared, 1, 1], dim=1))


_OF_A_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp.down",
}
_AROUND = {
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
    """Under the names of `PlainModel` with fused and with separate products."""
    return dict(pair for name, value in ours.items() for pair in _plain(name, value, work))


def _plain(name: str, value: Tensor, work: Work) -> Named:
    part, kind = name.rsplit(".", 1)
    if part == "word_bias":
        yield "heads.word_bias", value
    elif part in _AROUND:
        yield f"{_AROUND[part]}.{kind}", value
        if part == "embedding.word_embeddings" and work.family != "llama":
            yield "scores.weight", value
    else:
        layer, inside = part.removeprefix("decoder.layers.").split(".", 1)
        yield from _of_a_layer(f"blocks.{layer}", inside, kind, value, work)


def _of_a_layer(block: str, inside: str, kind: str, value: Tensor, work: Work) -> Named:
    if inside in _OF_A_LAYER:
        yield f"{block}.{_OF_A_LAYER[inside]}.{kind}", value
        return
    several = {
        "self_attention.linear_qkv": ("attention.qkv", partial(queries_keys_values, work=work)),
        "mlp.linear_fc1": ("mlp.up", lambda whole: whole.chunk(2 if work.shape.gated else 1)),
    }
    theirs, parts_of = several[inside]
    parts = parts_of(value)
    yield f"{block}.{theirs}.fused.{kind}", torch.cat(parts)
    for i, part in enumerate(parts):
        yield f"{block}.{theirs}.{i}.{kind}", part


def load_plain(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy `as_plain` weights into a `PlainModel`, or a stage of it, before anything wraps it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fused = name.replace(".qkv.0.", ".qkv.fused.").replace(".up.0.", ".up.fused.")
            candidates = (weights[one] for one in (name, fused) if one in weights)
            parameter.copy_(next(value for value in candidates if value.shape == parameter.shape))
