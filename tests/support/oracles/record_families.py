"""What transformers computes of the families in families.py, in float64: families.json beside this file.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/support/oracles/record_families.py

Every float32 that transformers asks for by name is made float64, so the numbers have no rounding but float64's. Weights are
`value_of` our names, taken apart into theirs by the rows below, which nothing of megatron/ reads.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double

import transformers  # noqa: E402
from families import FAMILIES, LENGTH, SIZES, TOKENS, Family, value_of  # noqa: E402

# Of a layer: theirs -> ours, operation.
_ATTENTION = {f"self_attn.{name}_proj": ("self_attention.linear_qkv", name) for name in "qkv"}
_ATTENTION |= {"self_attn.o_proj": ("self_attention.linear_proj", "copy")}
_ATTENTION |= {f"self_attn.{name}_norm": (f"self_attention.{name}_layernorm", "flat") for name in "qk"}
_MLP = {"mlp.gate_proj": ("mlp.linear_fc1", "gate"), "mlp.up_proj": ("mlp.linear_fc1", "up")}
_MLP |= {"mlp.down_proj": ("mlp.linear_fc2", "copy")}
_UNGATED = {"mlp.up_proj": ("mlp.linear_fc1", "copy"), "mlp.down_proj": ("mlp.linear_fc2", "copy")}
_NORMS = {"input_layernorm": ("input_layernorm", "copy"), "post_attention_layernorm": ("pre_mlp_layernorm", "copy")}
_AFTER = {"post_attention_layernorm": ("post_self_attn_layernorm", "copy")}
_AFTER |= {"post_feedforward_layernorm": ("post_mlp_layernorm", "copy")}
_SANDWICH = _NORMS | _AFTER | {"pre_feedforward_layernorm": ("pre_mlp_layernorm", "copy")}
_LLAMA = _ATTENTION | _MLP | _NORMS
_FC = {"mlp.fc1": ("mlp.linear_fc1", "copy"), "mlp.fc2": ("mlp.linear_fc2", "copy")}
_ENDS = {"embed_tokens": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "lm_head": "output_layer"}
_OTHER_ENDS = {
    "GPT2LMHeadModel": {"wte": _ENDS["embed_tokens"], "wpe": "embedding.position_embeddings", "ln_f": _ENDS["norm"]},
    "GPTNeoXForCausalLM": {
        "embed_in": _ENDS["embed_tokens"],
        "final_layer_norm": _ENDS["norm"],
        "embed_out": "output_layer",
        "lm_head": "output_layer",
    },
    "PhiForCausalLM": _ENDS | {"final_layernorm": _ENDS["norm"]},
}
_LAYERS = {
    "GPT2LMHeadModel": {
        **{"ln_1": ("input_layernorm", "copy"), "ln_2": ("pre_mlp_layernorm", "copy")},
        **{
            "attn.c_attn": ("self_attention.linear_qkv", "qkv_conv"),
            "attn.c_proj": ("self_attention.linear_proj", "conv"),
        },
        **{"mlp.c_fc": ("mlp.linear_fc1", "conv"), "mlp.c_proj": ("mlp.linear_fc2", "conv")},
    },
    "GPTNeoXForCausalLM": {
        **(_NORMS | {"attention.query_key_value": ("self_attention.linear_qkv", "copy")}),
        **{"attention.dense": ("self_attention.linear_proj", "copy")},
        **{"mlp.dense_h_to_4h": ("mlp.linear_fc1", "copy"), "mlp.dense_4h_to_h": ("mlp.linear_fc2", "copy")},
    },
    "Gemma2ForCausalLM": _ATTENTION | _MLP | _SANDWICH,
    "Gemma3ForCausalLM": _ATTENTION | _MLP | _SANDWICH,
    "PhiForCausalLM": _ATTENTION
    | _NORMS
    | _FC
    | {"self_attn.dense": ("self_attention.linear_proj", "copy")}
    | {f"self_attn.{name}_layernorm": (f"self_attention.{name}_layernorm", "copy") for name in "qk"},
    "Phi3ForCausalLM": _LLAMA
    | {"self_attn.qkv_proj": ("self_attention.linear_qkv", "qkv_rows"), "mlp.gate_up_proj": ("mlp.linear_fc1", "copy")},
    "Olmo2ForCausalLM": _ATTENTION | _MLP | _AFTER,
    "Olmo3ForCausalLM": _ATTENTION | _MLP | _AFTER,
    "Starcoder2ForCausalLM": _ATTENTION
    | _NORMS
    | {"mlp.c_fc": ("mlp.linear_fc1", "copy"), "mlp.c_proj": ("mlp.linear_fc2", "copy")},
    "NemotronForCausalLM": _ATTENTION | _NORMS | _UNGATED,
}


def our_place(architecture: str, theirs: str) -> tuple[str, str]:
    """Our name, without .weight or .bias, and the operation."""
    if found := re.search(r"\.(?:layers|h)\.(\d+)\.(.+)$", theirs):
        ours, operation = _LAYERS.get(architecture, _LLAMA)[found[2]]
        return f"decoder.layers.{found[1]}.{ours}", operation
    return _OTHER_ENDS.get(architecture, _ENDS)[theirs.rpartition(".")[2]], "copy"


def their_values(family: Family, theirs: str, shape: tuple[int, ...]) -> np.ndarray:
    stem, _, kind = theirs.rpartition(".")
    ours, operation = our_place(family.architecture, stem)
    name, tail = f"language_model.{ours}.{kind}", shape[1:]
    groups, plus = family.ours.get("num_query_groups", 4), family.ours.get("apply_layernorm_1p", False)
    d = family.ours.get("kv_channels", 8)

    def value(*of: int) -> np.ndarray:
        return value_of(name, of, plus=plus)

    def parts(*of: int) -> list[np.ndarray]:
        """Queries, keys and values of the fused tensor."""
        fused = value((4 + 2 * groups) * d, *of).reshape(groups, 4 // groups + 2, d, *of)
        return [x.reshape(-1, *of) for x in (fused[:, :-2], fused[:, -2], fused[:, -1])]

    match operation:
        case "q" | "k" | "v":
            return parts(*tail)["qkv".index(operation)]
        case "qkv_rows":
            return np.concatenate(parts(*tail))
        case "qkv_conv":
            return np.concatenate(parts(32)).T if kind == "weight" else np.concatenate(parts())
        case "gate" | "up":
            return (
                value(2 * shape[0], *tail)[: shape[0]]
                if operation == "gate"
                else value(2 * shape[0], *tail)[shape[0] :]
            )
        case "conv" if kind == "weight":
            return value(*reversed(shape)).T
        case "flat":
            return value(int(np.prod(shape))).reshape(shape)
    return value(*shape)


def scores_of(family: Family) -> torch.Tensor:
    model_class = getattr(transformers, family.architecture)
    given = SIZES | {"tie_word_embeddings": "untie_embeddings_and_output_weights" not in family.ours} | family.theirs
    if family.architecture == "GPT2LMHeadModel":
        given |= {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
        given = {key: value for key, value in given.items() if key not in SIZES or key == "vocab_size"}
    config = model_class.config_class(**given, attn_implementation="eager")
    model = model_class(config).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = their_values(family, name, tuple(parameter.shape))
            assert values.shape == tuple(parameter.shape), (name, values.shape, parameter.shape)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return model(torch.tensor(TOKENS), use_cache=False).logits


def rows(scores: torch.Tensor) -> Iterator[str]:
    """The last token's scores of both texts; and of each token one sum over the words, with weights 1, 1/2, 1/3, ..."""
    assert scores.dtype == torch.float64 and bool(scores.isfinite().all())
    weights = 1 / torch.arange(1, scores.shape[-1] + 1)
    yield f'"last": {json.dumps(scores[:, -1].tolist())}'
    yield f'"sums": {json.dumps((scores * weights).sum(-1).tolist())}'


def main() -> None:
    versions = {
        name: module.__version__ for name, module in {"torch": torch, "transformers": transformers, "numpy": np}.items()
    }
    lines = [f'  "versions": {json.dumps(versions)}']
    for name, family in FAMILIES.items():
        scores = scores_of(family)
        print(f"{name}: scores of {scores.abs().max():.1f}")
        lines.append(f"  {json.dumps(name)}: {{\n    " + ",\n    ".join(rows(scores)) + "\n  }")
    Path(__file__).with_suffix(".json").with_stem("families").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
