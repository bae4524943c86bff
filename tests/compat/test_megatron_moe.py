"""Our layer of experts against the whole MoE layer of Megatron core 0.17.1 and 0.19.0, on a CPU, in float32, one sample at a time;
and the functions of a router under Megatron's names against Megatron's, on random inputs.

    MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_megatron_moe.py -s

CLONE: a git clone of Megatron-LM with its tags. It runs from source in a process of its own (`moe_oracle.py`).
"""

import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.ops.aux_loss_collector import objective_of
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import ParallelMoE

CLONE = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(
    CLONE is None or not Path(CLONE).is_dir(),
    reason="MEGATRON_LM_PATH names no clone of Megatron-LM; see the head of this file",
)
ORACLE = Path(__file__).with_name("moe_oracle.py")
E, H, F, S, SAMPLES = 8, 16, 32, 12, 3
TOLERANCE = 1e-6  # of each tensor's largest value
LAYER = ModelConfig(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=4,
    ffn_hidden_size=F,
    moe_ffn_hidden_size=F,
    swiglu=True,
    add_bias_linear=False,
    num_experts=E,
)
SIGMOID = {"moe_router_score_function": "sigmoid"}
SQRT_SOFTPLUS = {"moe_router_score_function": "sqrtsoftplus"}
BIASED = {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
PRE = {"moe_router_pre_softmax": True}
SINKHORN = {"moe_router_load_balancing_type": ["sinkhorn"]}
SHARED = {"moe_shared_expert_intermediate_size": 24}
GATED = {**SHARED, "moe_shared_expert_gate": True}


def losses(*kinds: str) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": list(kinds), "moe_aux_loss_coeff": [0.3, 0.2, 0.1][: len(kinds)]}


def capacity(factor: float, policy: str = "probs", pad: bool = False) -> dict[str, Any]:
    return {
        "moe_expert_capacity_factor": factor,
        "moe_token_drop_policy": policy,
        "moe_pad_expert_input_to_capacity": pad,
    }


CASES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": PRE,
    "softmax of all, groups": {**PRE, **GROUPS},
    "softmax of the chosen, groups, scaled": {**GROUPS, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": SIGMOID,
    "sigmoid, one expert": {**SIGMOID, "moe_router_topk": 1},
    "sigmoid, one expert, weights on inputs": {**SIGMOID, "moe_router_topk": 1, "moe_apply_probs_on_input": True},
    "sigmoid, bias": {**SIGMOID, **BIASED},
    "sigmoid, bias, groups, scaled": {**SIGMOID, **BIASED, **GROUPS, "moe_router_topk_scaling_factor": 2.5},
    "sqrtsoftplus, bias": {**SQRT_SOFTPLUS, **BIASED},
    "shared experts": SHARED,
    "shared experts with a gate": GATED,
    "biases": {"add_bias_linear": True, "moe_router_bias": True},
    "not gated": {"swiglu": False},
    "router in float64": {"moe_router_dtype": "fp64", **losses("aux_loss")},
    "aux_loss": losses("aux_loss"),
    "seq_aux_loss": losses("seq_aux_loss"),
    "global_aux_loss": losses("global_aux_loss"),
    "all losses": {**losses("aux_loss", "seq_aux_loss", "global_aux_loss"), "moe_z_loss_coeff": 0.01},
    "losses of sigmoid": {**SIGMOID, **BIASED, **losses("seq_aux_loss", "global_aux_loss"), "moe_z_loss_coeff": 0.01},
    "losses of sqrtsoftplus": {**SQRT_SOFTPLUS, **losses("aux_loss")},
    "losses of groups": {**PRE, **GROUPS, **losses("aux_loss")},
    "z-loss": {"moe_z_loss_coeff": 0.1},
    "sinkhorn": {**SINKHORN, "moe_router_topk": 1},
    "sinkhorn of two, z-loss": {**SINKHORN, "moe_z_loss_coeff": 0.1},
    "sinkhorn of a microbatch": SINKHORN,
    "sigmoid, softmax of all": {**SIGMOID, **PRE},
    "sigmoid, softmax of all, groups": {**SIGMOID, **PRE, **GROUPS},
    **{
        f"capacity {factor}, {policy}{', padded' * pad}": capacity(factor, policy, pad)
        for factor in (0.5, 1.0)
        for policy in ("probs", "position")
        for pad in (False, True)
    },
    "capacity of sigmoid with bias and losses": {**SIGMOID, **BIASED, **capacity(0.75), **losses("aux_loss")},
    "a large capacity": capacity(8.0),
}
SAMPLES_OF_MICROBATCH = {"sinkhorn of a microbatch": SAMPLES}  # of the others 1
DISPATCHERS = "allgather", "alltoall"
SINCE_0_19 = {"sqrtsoftplus, bias", "losses of sqrtsoftplus"}


def calls_of_functions(tag: str) -> list[dict[str, Any]]:
    """Calls of Megatron's pure functions of a router, with every option, on drawn inputs."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    scores = ["softmax", "sigmoid", *(["sqrtsoftplus"] if tag == "core_v0.19.0" else [])]
    dense = [{}, {"dense_output": True}] if tag in ("core_v0.17.1", "core_v0.19.0") else [{}]
    # earlier releases round scores to bfloat16 before they choose
    dtypes = (torch.float32, torch.bfloat16) if tag == "core_v0.19.0" else (torch.float32,)
    calls: list[dict[str, Any]] = []

    def call(function: str, *inputs: Any, **options: Any) -> None:
        calls.append({"function": function, "inputs": inputs, "options": options})

    for function, groups, k, pre, scaling, bias, kind, dtype in product(
        scores, (None, 4), (1, 4), (False, True), (None, 2.5), (False, True), dense, dtypes
    ):
        options = {"use_pre_softmax": pre, "scaling_factor": scaling, "score_function": function, **kind}
        if groups:
            options |= {"num_groups": groups, "group_topk": 2 if k > 1 else 1}
        if bias and function != "softmax":
            options["expert_bias"] = draw(E) / 5
        # no two scores, and no sums of two, are equal, in bfloat16 either
        logits = (
            torch.stack([torch.randperm(E, generator=generator) for _ in range(10)]).float().add(1).pow(1.7) / 10 - 2
        )
        call("topk_routing_with_score_function", logits.to(dtype), k, **options)
    for function, k, mask in product(scores, (1, 3), (False, True)):
        options = {"padding_mask": torch.arange(10) % 4 == 0} if mask and tag != "core_v0.14.0" else {}
        call("compute_routing_scores_for_aux_loss", draw(10, E), k, function, **options)
    for coefficient in (0.3, 1.0):
        numbers = (draw(10, E).softmax(-1), torch.randint(9, (E,), generator=generator), 30, 3, E, coefficient)
        call("switch_load_balancing_loss_func", *numbers)
        if tag != "core_v0.14.0":
            call("switch_load_balancing_loss_func", *numbers, padding_mask=torch.arange(10) % 3 > 0)
        counts = torch.randint(9, (E,), generator=generator)
        call("get_updated_expert_bias", counts, draw(E), 0.001)
    factors = (
        (0.25, 0.5, 1.0) if tag == "core_v0.14.0" else (0.25, 0.5, 1.0, 8.0)
    )  # it has no capacity above all tokens
    for factor, policy, pad in product(factors, ("probs", "position"), (False, True)):
        logits = draw(12, E)
        chosen = torch.zeros(12, E, dtype=torch.bool).scatter(1, logits.topk(2).indices, True)
        weights = logits.softmax(-1)  # of which no two are equal
        call("apply_router_token_dropping", weights, chosen, 2, factor, policy, pad)
    for tokens, experts, factor, least in product((7, 96), (4, 6), (0.3, 1.0, 1.25), (None, 5)):
        call("get_capacity", tokens, experts, factor, least)
    call("z_loss_func", draw(10, E), 0.1)
    call("group_limited_topk", draw(10, E), 4, 10, E, 4, 2)
    call("sinkhorn", draw(10, E))
    return calls


@pytest.mark.parametrize("tag", ["core_v0.14.0", "core_v0.17.1", "core_v0.19.0"])
def test_the_functions_of_a_router_return_what_megatrons_return(tag: str, tmp_path: Path):
    calls = calls_of_functions(tag)
    whole = [pickle.loads(pickle.dumps(call)) for call in calls]  # some change their inputs
    expected = ask(tag, whole, tmp_path)
    parallel_state.set_thread_mesh(single_rank_mesh())
    try:
        answers = [getattr(moe_utils, call["function"])(*call["inputs"], **call["options"]) for call in calls]
    finally:
        parallel_state.set_thread_mesh(None)
    for call, ours, theirs in zip(calls, answers, expected, strict=True):
        pairs = zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]
        for mine, value in pairs:
            assert type(mine) is type(value), call
            if isinstance(value, Tensor):  # with its dtype and shape
                torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-7, msg=partial("{1}\n{0}".format, call))
            else:
                assert mine == value, call
    print(f"\n{tag}: {len(calls)} calls")


def ours_of(options: dict[str, Any]) -> tuple[ParallelMoE, Tensor, Tensor]:
    """A layer with drawn weights, inputs and factors of its outputs [s, b, h]."""
    config = replace(LAYER, **options)
    context = LayerContext.from_mesh(single_rank_mesh(), torch.float32, SampleDropoutKeys(3))
    context.aux_losses.num_layers = 1
    context.aux_losses.declare(*config.aux_loss_names)
    layer = ParallelMoE(config, 0, context)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.randn(E, generator=generator) / 5)
    x, factors = (torch.randn(S, SAMPLES, H, generator=generator) for _ in range(2))
    return layer, x, factors


def answer(layer: ParallelMoE, x: Tensor, factors: Tensor, size: int = 1) -> dict[str, Tensor]:
    """Output, gradients, auxiliary losses, counts and next bias, in one step of microbatches of `size` samples."""
    x = x.requires_grad_()
    found: dict[str, Any] = {}
    outputs = []
    for i in range(0, SAMPLES, size):
        here = slice(i, i + size)
        layer.context.keys.samples = tuple(range(SAMPLES))[here]
        with layer.context.aux_losses.collecting() as collected:
            outputs.append(layer(x[:, here]))
        objective = (outputs[-1] * factors[:, here]).sum() / factors.numel()
        aux = objective_of(collected)
        (objective if aux is None else objective + aux * size / SAMPLES).backward()
        for loss in collected:
            found.setdefault(loss.name, []).append(loss.value.item())
    found = {name: torch.tensor(values) for name, values in found.items()}
    found |= {"output": torch.cat(outputs, 1).detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    if layer.router.expert_bias is not None:
        found["counts"] = layer.router.tokens_per_expert.clone()
        layer.router.end_of_step()
        found["expert_bias"] = layer.router.expert_bias.clone()
    return found


def megatron_options(options: dict[str, Any], dispatcher: str) -> dict[str, Any]:
    """In the names of Megatron's TransformerConfig, whose router has a bias where linear layers have one."""
    same = {"hidden_size": H, "num_attention_heads": 4, "ffn_hidden_size": F, "moe_ffn_hidden_size": F}
    same |= {"add_bias_linear": False, "moe_router_topk": 2, "num_moe_experts": E, **options}
    same.pop("moe_router_bias", None)
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(same.get(name, ())) == 1:
            (same[name],) = same[name]
    return same | {"moe_token_dispatcher_type": dispatcher}


def ask(tag: str, cases: list[dict], folder: Path) -> list[dict[str, Tensor]]:
    """What the MoE layer of a tag computes of the cases."""
    archive = subprocess.run(["git", "-C", CLONE, "archive", tag, "megatron/core"], capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder / tag, filter="data")
    torch.save(cases, folder / "cases.pt")
    command = [
        sys.executable,
        "-I",
        str(ORACLE),
        str(folder / tag),
        *(str(folder / f"{name}.pt") for name in ("cases", "answers")),
    ]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "answers.pt")


@pytest.mark.parametrize("tag", ["core_v0.17.1", "core_v0.19.0"])
def test_a_layer_computes_what_megatrons_computes(tag: str, tmp_path: Path):
    names = [
        (name, dispatcher)
        for name in CASES
        for dispatcher in DISPATCHERS
        if tag != "core_v0.17.1" or name not in SINCE_0_19
    ]
    cases, expected = [], []
    for name, dispatcher in names:
        options = CASES[name]
        layer, x, factors = ours_of({**options, "moe_token_dispatcher_type": dispatcher})
        weights = {parameter: value.detach().clone() for parameter, value in layer.named_parameters()}
        bias = layer.router.expert_bias
        case = {
            "options": megatron_options(options, dispatcher),
            "x": x.clone(),
            "factors": factors,
            "weights": weights,
        }
        size = SAMPLES_OF_MICROBATCH.get(name, 1)
        cases.append({**case, "size": size, "expert_bias": None if bias is None else bias.clone()})
        expected.append(answer(layer, x, factors, size))
    worst: dict[str, float] = {}
    for (name, dispatcher), ours, theirs in zip(names, expected, ask(tag, cases, tmp_path), strict=True):
        assert ours.keys() == theirs.keys(), name
        for key, value in theirs.items():
            error = ((ours[key].double() - value.double().view(ours[key].shape)).abs().max() / value.abs().max()).item()
            kind = key if key == "output" else "gradients" if key == "input" or "." in key else "losses, counts, biases"
            worst[kind] = max(worst.get(kind, 0.0), error)
            if not error <= TOLERANCE:
                print(f"{tag} {name} {dispatcher}: {key} differs by {error:.1e}")
    print(f"\n{tag}: {len(names)} cases", *(f"{kind} {error:.1e}" for kind, error in worst.items()), sep=", ")
    assert max(worst.values()) <= TOLERANCE
