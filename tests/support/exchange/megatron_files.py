"""Checkpoints as Megatron-LM writes them, of the models of `cases.py`: the layout of its files, written down once more.

    write(root, "gpt2", tp=2, pp=2, vpp=1, version=0)      root/iter_0000007/mp_rank_01_001/model_optim_rng.pt, ...

The weights are those of the folders of Hugging Face, so what transformers computes is what must come out. Nothing of the product is
used, which is to be tested.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))
from cases import read_record, weight

ITERATION = 7


def tensors_of(case: str) -> dict[str, Tensor]:
    return {name: torch.tensor(weight(name, tuple(shape))) for name, shape in read_record(case)["shapes"].items()}


def args_of(case: str, **more: Any) -> Namespace:
    """What the run's flags would have been; hundreds more are left out."""
    config = read_record(case)["config"]
    common = {"params_dtype": torch.float64, "seq_length": 14, "bf16": False, "fp16": False, "iteration": ITERATION}
    common |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_experts": None, "rank": 0, "lr": 1e-4}
    if case == "gpt2":
        shape = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "max_position_embeddings": 16}
        own = {"layernorm_epsilon": config["layer_norm_epsilon"], "ffn_hidden_size": 96, "bias_gelu_fusion": True}
        return Namespace(**common | shape | own | {"padded_vocab_size": 32} | more)
    if case == "mixtral":
        common |= {"num_experts": 4, "moe_router_topk": 2, "ffn_hidden_size": 20, "moe_layer_freq": 1, "kv_channels": 6}
        common |= {"window_size": (4, 0), "moe_token_dispatcher_type": "alltoall", "moe_router_pre_softmax": False}
    if case == "qwen2_moe":
        common |= {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": [1, 0, 1]}
        common |= {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True, "add_qkv_bias": True}
        common |= {"moe_router_pre_softmax": True, "moe_router_score_function": "softmax", "moe_grouped_gemm": True}
        common |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_router_dtype": "fp32"}
    shape = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "max_position_embeddings": 32}
    own = {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 4, "ffn_hidden_size": 40}
    own |= {
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "add_bias_linear": False,
    }
    own |= {"position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0}
    own |= {"untie_embeddings_and_output_weights": not config["tie_word_embeddings"], "padded_vocab_size": 32}
    return Namespace(**shape | own | common | more)


# ---------------------------------------------------------------- one rank's part of each tensor


def padded(table: Tensor) -> Tensor:
    """A word table with one more row, which no text has."""
    return torch.cat([table, table.new_zeros(1, *table.shape[1:])])


def part(x: Tensor, rank: int, tp: int, dim: int = 0) -> Tensor:
    return x.chunk(tp, dim)[rank].contiguous()


def gated_part(gate: Tensor, up: Tensor, rank: int, tp: int) -> Tensor:
    return torch.cat([part(gate, rank, tp), part(up, rank, tp)])


def qkv_part(q: Tensor, k: Tensor, v: Tensor, groups: int, rank: int, tp: int, version: float) -> Tensor:
    """Rows of queries, keys and values in the order of a version, of one rank's heads."""
    width = k.shape[0] // groups
    heads = [x.reshape(groups, -1, width, *x.shape[1:]) for x in (q, k, v)]  # [g, n/g | 1 | 1, d, ...]
    mine = torch.cat(heads, 1).reshape(-1, *q.shape[1:]).chunk(tp)[rank]
    if version < 2:  # heads of their own: [n, 3, d, ...]
        mine = mine.reshape(-1, 3, width, *q.shape[1:])
        mine = mine.transpose(0, 1) if version < 1 else mine.transpose(1, 2)
    return mine.reshape(-1, *q.shape[1:]).contiguous()


def gpt2_layer(x: dict[str, Tensor], i: int, rank: int, tp: int, version: float) -> dict[str, Tensor]:
    """A layer with the names of 2019 to 2021."""
    at = f"transformer.h.{i}."
    found = {}
    for kind in ("weight", "bias"):
        fused = x[f"{at}attn.c_attn.{kind}"].t() if kind == "weight" else x[f"{at}attn.c_attn.{kind}"]
        found[f"attention.query_key_value.{kind}"] = qkv_part(*fused.chunk(3), 6, rank, tp, version)
        found[f"input_layernorm.{kind}"] = x[f"{at}ln_1.{kind}"]
        found[f"post_attention_layernorm.{kind}"] = x[f"{at}ln_2.{kind}"]
    found["attention.dense.weight"] = part(x[f"{at}attn.c_proj.weight"].t(), rank, tp, 1)
    found["mlp.dense_h_to_4h.weight"] = part(x[f"{at}mlp.c_fc.weight"].t(), rank, tp)
    found["mlp.dense_h_to_4h.bias"] = part(x[f"{at}mlp.c_fc.bias"], rank, tp)
    found["mlp.dense_4h_to_h.weight"] = part(x[f"{at}mlp.c_proj.weight"].t(), rank, tp, 1)
    found["attention.dense.bias"] = x[f"{at}attn.c_proj.bias"]
    found["mlp.dense_4h_to_h.bias"] = x[f"{at}mlp.c_proj.bias"]
    return found


def llama_layer(x: dict[str, Tensor], i: int, rank: int, tp: int, fused_norms: bool) -> dict[str, Tensor]:
    """A layer with the names of megatron-core; fused_norms: as Transformer Engine has them."""
    at = f"model.layers.{i}."
    has_experts = f"{at}mlp.gate.weight" in x or f"{at}block_sparse_moe.gate.weight" in x
    first, second = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    q, k, v = (x[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
    biases = {}
    if f"{at}self_attn.q_proj.bias" in x:
        q_bias, k_bias, v_bias = (x[f"{at}self_attn.{name}_proj.bias"] for name in "qkv")
        biases = {"self_attention.linear_qkv.bias": qkv_part(q_bias, k_bias, v_bias, 2, rank, tp, 3.0)}
    mlp = {}
    if not has_experts:
        gate, up, down = (x[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        mlp = {
            "mlp.linear_fc1.weight": gated_part(gate, up, rank, tp),
            "mlp.linear_fc2.weight": part(down, rank, tp, 1),
        }
    attention = {
        first if fused_norms else "input_layernorm.weight": x[f"{at}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv_part(q, k, v, 2, rank, tp, 3.0),
        "self_attention.linear_proj.weight": part(x[f"{at}self_attn.o_proj.weight"], rank, tp, 1),
        second if fused_norms and not has_experts else "pre_mlp_layernorm.weight": x[
            f"{at}post_attention_layernorm.weight"
        ],
    }
    return biases | mlp | attention


def experts_of_layer(
    x: dict[str, Tensor], i: int, rank: int, tp: int, experts: range, layout: str, etp: int | None = None
) -> dict[str, Tensor]:
    """The router, the shared expert and these experts of a layer of qwen2_moe; {} for a layer without.

    layout: "local_experts", "numbered", "grouped", or "stacked" as torch_dist has them. etp: ranks that share an expert.
    """
    at = f"model.layers.{i}.mlp."
    gate, up, down = ("gate_proj", "up_proj", "down_proj")
    if f"model.layers.{i}.block_sparse_moe.gate.weight" in x:  # mixtral
        at = f"model.layers.{i}.block_sparse_moe."
        gate, up, down = ("w1", "w3", "w2")
    if f"{at}gate.weight" not in x:
        return {}
    found = {"mlp.router.weight": x[f"{at}gate.weight"]}
    if f"{at}shared_expert_gate.weight" in x:
        shared = [x[f"{at}shared_expert.{name}.weight"] for name in (gate, up)]
        found["mlp.shared_experts.linear_fc1.weight"] = gated_part(*shared, rank, tp)
        found["mlp.shared_experts.linear_fc2.weight"] = part(x[f"{at}shared_expert.{down}.weight"], rank, tp, 1)
        found["mlp.shared_experts.gate_weight"] = x[f"{at}shared_expert_gate.weight"]
    etp = etp or tp
    mine = rank % etp
    ups = [gated_part(*(x[f"{at}experts.{e}.{name}.weight"] for name in (gate, up)), mine, etp) for e in experts]
    downs = [part(x[f"{at}experts.{e}.{down}.weight"], mine, etp, 1) for e in experts]
    for module, matrices in {"linear_fc1": ups, "linear_fc2": downs}.items():
        if layout == "stacked":
            found[f"mlp.experts.experts.{module}.weight"] = torch.stack(matrices)
        elif layout == "grouped":  # the memory of [experts, in, out]
            turned = torch.stack([matrix.t() for matrix in matrices])
            shape = (24, -1) if module == "linear_fc1" else (-1, 24)
            found[f"mlp.experts.weight{module[-1]}"] = turned.reshape(shape).contiguous()
        else:
            for number, matrix in enumerate(matrices):
                one = (
                    f"local_experts.{number}.{module}.weight"
                    if layout == "local_experts"
                    else f"{module}.weight{number}"
                )
                found[f"mlp.experts.{one}"] = matrix
    return found


# ---------------------------------------------------------------- one rank's chunk


def gpt2_chunk(x: dict, layers: range, rank: int, tp: int, version: float, ends: tuple[bool, bool], age: str) -> dict:
    stack: dict[str, Tensor] = {}
    for local, i in enumerate(layers):
        stack |= {f"layers.{local}.{name}": t for name, t in gpt2_layer(x, i, rank, tp, version).items()}
    inner: dict[str, Any] = {age: stack}
    words = part(padded(x["transformer.wte.weight"]), rank, tp)
    if ends[0]:
        inner["embedding"] = {"word_embeddings": {"weight": words}}
        inner["embedding"]["position_embeddings"] = {"weight": x["transformer.wpe.weight"]}
    if ends[1]:
        stack |= {f"final_layernorm.{kind}": x[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    found: dict[str, Any] = {"language_model": inner}
    if ends == (False, True):
        found["word_embeddings_for_head"] = {"weight": words}
    return found


def llama_chunk(
    x: dict,
    layers: range,
    rank: int,
    tp: int,
    ends: tuple[bool, bool],
    fused_norms: bool,
    experts: range = range(0),
    layout: str = "",
    etp: int | None = None,
) -> dict:
    found: dict[str, Any] = {}
    for local, i in enumerate(layers):
        mine = llama_layer(x, i, rank, tp, fused_norms) | experts_of_layer(x, i, rank, tp, experts, layout, etp)
        found |= {f"decoder.layers.{local}.{name}": t for name, t in mine.items()}
        found[f"decoder.layers.{local}.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    table = x["model.embed_tokens.weight"]
    if ends[0]:
        found["embedding.word_embeddings.weight"] = part(padded(table), rank, tp)
    if ends[1]:
        found["decoder.final_layernorm.weight"] = x["model.norm.weight"]
        if "lm_head.weight" in x or not ends[0]:  # of a tied model, where the table is on another stage
            found["output_layer.weight"] = part(padded(x.get("lm_head.weight", table)), rank, tp)
    return found


def split(layers: int, chunks: int) -> list[range]:
    """Layers over the chunks in their order, the first ones with more."""
    sizes = [layers // chunks + (i < layers % chunks) for i in range(chunks)]
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(chunks)]


def write(
    root: Path,
    case: str,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    version: float = 3.0,
    age: str = "encoder",
    change: Any = lambda rank, stage, values: None,
    zipped: bool = True,
    fused_norms: bool = False,
    ep: int = 1,
    etp: int | None = None,
    layout: str = "local_experts",
    **more: Any,
) -> Path:
    """The folder of a run; returns that of its iteration. age: the stack's name in old files. change: of a rank's values.

    ep, etp, layout: of a case with four experts, how many ranks divide them, how many share one (default: tp), and how their
    tensors are named. If fewer than tp share one, a run has files of these ranks: r % tp with r // etp % ep.
    """
    if ep > 1:
        more |= {"expert_model_parallel_size": ep}
    if etp is not None:
        more |= {"expert_tensor_parallel_size": etp}
    for expert_rank in range(ep):
        experts = range(expert_rank * 4 // ep, (expert_rank + 1) * 4 // ep)
        suffix = f"_{expert_rank:03d}" if ep > 1 else ""
        _write_ranks(
            *(root, case, tp, pp, vpp, version, age, change, zipped, fused_norms),
            *(
                (experts, layout, suffix),
                etp,
                {r % tp for r in range(max(tp, ep * (etp or tp))) if r // (etp or tp) % ep == expert_rank},
            ),
            **more,
        )
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return root / f"iter_{ITERATION:07d}"


def _write_ranks(
    root: Path,
    case: str,
    tp: int,
    pp: int,
    vpp: int,
    version: float,
    age: str,
    change: Any,
    zipped: bool,
    fused_norms: bool,
    of_experts: tuple[range, str, str],
    etp: int | None,
    tensor_ranks: set[int],
    **more: Any,
) -> None:
    """The files of one expert-parallel rank."""
    experts, layout, suffix = of_experts
    folder, x = root / f"iter_{ITERATION:07d}", tensors_of(case)
    ranges = split(3, pp * vpp)
    for rank in sorted(tensor_ranks):
        for stage in range(pp):
            sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            values: dict[str, Any] = {
                "args": args_of(case, **sizes | more),
                "iteration": ITERATION,
                "checkpoint_version": version,
            }
            if version == 0:
                del values["checkpoint_version"]
            for chunk in range(vpp):
                number = chunk * pp + stage
                ends = (number == 0, number == pp * vpp - 1)
                if case == "gpt2":
                    made = gpt2_chunk(x, ranges[number], rank, tp, version, ends, age)
                else:
                    made = llama_chunk(x, ranges[number], rank, tp, ends, fused_norms, experts, layout, etp)
                values[f"model{chunk}" if vpp > 1 else "model"] = made
            values["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]
            change(rank, stage, values)
            path = (
                folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + suffix) / "model_optim_rng.pt"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(values, path, _use_new_zipfile_serialization=zipped)
