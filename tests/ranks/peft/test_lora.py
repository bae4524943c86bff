"""Adapters, one for each row range of a fused weight: any layout trains them as one process, dropout included."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT, GPT2, LLAMA, TINY_LLAMA, Layout, Outcome, assert_equal, build_chunks, run
from torch import nn

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.peft.lora import add_lora
from megatron.core.peft.lora_config import LoRAConfig
from megatron.core.sharding.placement import Normal
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.transformer.layer_parallel_context import LayerContext

AHEAD = DataParallelConfig(zero_stage=3, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = {
    "tp sp pp": Layout(tp=2, sp=True, pp=2, m=4),
    "tp shared heads": Layout(tp=8, m=2),
    "zb cp": Layout(pp=2, cp=2, m=4, schedule="zb-h1"),
    "vpp recomputed zero 1": Layout(
        pp=2, v=2, dp=2, m=2, schedule="interleaved", recompute="uniform 1", data_parallel=replace(AHEAD, zero_stage=1)
    ),
    "tp zero 3 selective": Layout(tp=2, dp=2, m=2, recompute="selective", data_parallel=AHEAD),
    "sp cp zero 2": Layout(tp=2, sp=True, cp=2, dp=2, m=1, data_parallel=replace(AHEAD, zero_stage=2)),
    "zero 3 zb-v": Layout(pp=2, dp=2, m=2, schedule="zb-v", v=2, data_parallel=AHEAD),
}
CONFIGS = {
    "parts": (LLAMA, LoRAConfig(lora_rank=2, lora_alpha=4.0, lora_dropout=0.3)),
    "some parts": (
        replace(LLAMA, num_query_groups=4),
        LoRAConfig(lora_rank=3, use_rslora=True, lora_target_modules=["q_proj", "v_proj", "up_proj", "output_layer"]),
    ),
    "whole": (
        GPT2,
        LoRAConfig(lora_rank=2, lora_target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
    ),
}


def adapted(config, lora: LoRAConfig, **parts) -> nn.Module:
    model = GPT.make(config, **parts)
    add_lora(model, lora, keys=model.context.keys, rows_of_sample=model.context.rows)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:  # else A has no gradient in the first step
            parameter.placement = replace(parameter.placement, init=Normal(0.1))
    return model


def run_adapted(case: str, layout: Layout) -> Outcome:
    config, lora = CONFIGS[case]
    subject = replace(GPT, make=partial(adapted, lora=lora))
    return run(config, layout, subject=subject, steps=2, global_batch=4)


@cache
def one_process(case: str) -> Outcome:
    return run_adapted(case, Layout())


FULL = {("tp sp pp", "parts")}


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, marks=pytest.mark.full if (layout, case) in FULL else pytest.mark.sweep)
        for layout in LAYOUTS
        for case in CONFIGS
    ],
)
def test_every_layout_trains_adapters_as_one_process(layout: str, case: str):
    got, expected = run_adapted(case, LAYOUTS[layout]), one_process(case)
    assert_equal(got, expected, 1e-10)
    trained = {key for key, grad in got.grads[-1].items() if grad.abs().max() > 0}
    assert trained == {key for key in got.weights if "lora" in key} and trained


def test_one_pair_for_each_part_computes_what_its_rows_of_the_fused_weight_would():
    """y of the adapted linear is that of a weight whose rows have B A added, part by part."""

    def work(mesh: Mesh) -> None:
        lora = LoRAConfig(lora_rank=2, lora_alpha=6.0)
        subject = replace(GPT, make=partial(adapted, lora=lora))
        chunks, _, _ = build_chunks(mesh, TINY_LLAMA, Layout(), subject=subject)
        layer = chunks[0].module.language_model.decoder.layers[0]
        n, g, d = TINY_LLAMA.num_attention_heads, TINY_LLAMA.num_query_groups, TINY_LLAMA.head_width
        x = torch.randn(3, 2, TINY_LLAMA.hidden_size, dtype=torch.float64)
        qkv = layer.self_attention.linear_qkv
        deltas = [qkv.pair(part)[1] @ qkv.pair(part)[0] * 3.0 for part in ("linear_q", "linear_k", "linear_v")]
        q, k, v = (delta.view(g, -1, delta.shape[1]) for delta in deltas)
        assert q.shape[1] == n // g * d
        weight = qkv.weight + torch.cat((q, k, v), dim=1).flatten(0, 1)
        torch.testing.assert_close(qkv(x)[0], x @ weight.T, rtol=1e-12, atol=1e-12)
        fc1 = layer.mlp.linear_fc1
        deltas = [fc1.pair(part)[1] @ fc1.pair(part)[0] * 3.0 for part in ("linear_fc1_gate", "linear_fc1_up")]
        torch.testing.assert_close(fc1(x)[0], x @ (fc1.weight + torch.cat(deltas)).T, rtol=1e-12, atol=1e-12)

    run_ranks({}, work)


class Doubled(MatmulBackend):
    """A backend without a product of its own that adds."""

    def forward(self, x, weight, state):
        return 2 * x @ weight.t()

    def dgrad(self, grad, weight, state):
        return 2 * grad @ weight

    def wgrad(self, grad, x, state):
        return 2 * grad.t() @ x


@pytest.mark.parametrize("backend", [None, Doubled()], ids=["torch's", "another"])
@pytest.mark.parametrize("targets", [["all-linear"], ["k_proj", "q_proj", "up_proj"], ["linear_qkv", "linear_fc1"]])
def test_gradients_without_buffers_are_those_of_autograd(targets: list[str], backend: MatmulBackend | None):
    """Of x and of every A and B, one of which is frozen; for rows that repeat by groups, for one block each, and for all rows."""

    def work(mesh: Mesh) -> None:
        context = LayerContext.from_mesh(mesh, torch.float64).with_matmul_backend(backend)
        config = replace(TINY_LLAMA, num_layers=1)
        model = GPT.make(config, vocab_size=16, layers=range(1), context=context)
        add_lora(model, LoRAConfig(lora_rank=2, lora_alpha=3.0, lora_target_modules=targets))
        layer = model.language_model.decoder.layers[0]
        scale = 1.5
        factor = 1.0 if backend is None else 2.0
        for linear in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            pairs = {part: linear.pair(part) for part in linear.adapters}
            first = next(iter(pairs.values()))[1]
            first.requires_grad_(False)
            for _, b in pairs.values():
                nn.init.normal_(b)
            trained = [p for pair in pairs.values() for p in pair if p.requires_grad]
            x = torch.randn(3, 2, config.hidden_size, dtype=torch.float64, requires_grad=True)
            rows = [linear.weight.unflatten(0, (linear.rows.groups, -1))[:, :0]]  # groups of rows, part by part
            for part, size in ({"": linear.rows.of_group} if "" in pairs else linear.rows.sizes).items():
                delta = linear.weight.new_zeros(linear.rows.groups * size, config.hidden_size)
                if part in pairs:
                    delta = factor * scale * pairs[part][1] @ pairs[part][0]
                rows.append(delta.unflatten(0, (linear.rows.groups, -1)))
            expected = factor * x @ (linear.weight + torch.cat(rows, dim=1).flatten(0, 1)).T
            weights = torch.randn_like(expected)
            expected_grads = torch.autograd.grad((expected * weights).sum(), [x, *trained])
            got = linear(x)[0]
            got_grads = torch.autograd.grad((got * weights).sum(), [x, *trained])
            for a, b in zip((got, *got_grads), (expected, *expected_grads), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    run_ranks({}, work)
