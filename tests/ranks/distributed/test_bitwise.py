"""The same bits: layouts that change no shape of a product change no bit, once gradients are summed in one order.

With --fixed-order-grad-reduce the gradients of microbatches are added by their number, whichever rank computed them, and the
norm of the gradient is summed exactly. The losses of microbatches are float32 and are added in float64, which is exact: 24 bits
each, in 53. So data and pipeline parallelism, the schedule, recomputation and the time at which calls complete change nothing
at all. Tensor parallelism does: it divides the sums inside the products (test_precision has its tolerance and the reason).
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, Layout, Outcome, assert_same_bits, build, run

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.transformer.model_config import ModelConfig

pytestmark = pytest.mark.full  # the fast set keeps the covering pairs of test_parity.py

FIXED = DataParallelConfig(fixed_order_grad_reduce=True)
WORDS = "language_model.embedding.word_embeddings.weight"
SAMPLES = 8  # of a step, each a microbatch of its own: dp x m
SINGLE, HALF = {"fp64": False}, {"fp64": False, "bf16": True}
SMALL_GPT2, SMALL_LLAMA = replace(GPT2, hidden_size=16), replace(LLAMA, hidden_size=16, ffn_hidden_size=24)
MODELS: dict[str, ModelConfig] = {
    "gpt2-float32": replace(SMALL_GPT2, **SINGLE),
    "gpt2-bfloat16": replace(SMALL_GPT2, **HALF),
    "llama-float32": replace(SMALL_LLAMA, **SINGLE),
    "llama-bfloat16": replace(SMALL_LLAMA, **HALF),
    "llama-tied-bfloat16": replace(SMALL_LLAMA, **HALF, untie_embeddings_and_output_weights=False),
}
LAYOUTS = [
    Layout(m=8, recompute="selective"),
    Layout(m=8, recompute="uniform 2"),
    Layout(m=8, schedule="zb-h1"),
    Layout(dp=2, m=4),
    Layout(dp=4, m=2, recompute="block 1"),
    Layout(dp=8, m=1),
    Layout(pp=2, m=8),
    Layout(pp=4, m=8, schedule="gpipe"),
    Layout(pp=4, m=8, schedule="zb-h1", recompute="uniform 1"),
    Layout(pp=2, v=2, m=8, schedule="interleaved"),
    Layout(pp=2, v=2, dp=2, m=4, schedule="interleaved", recompute="block 1", delayed=True),
    Layout(pp=4, dp=2, m=4),
    Layout(pp=2, dp=4, m=2, schedule="zb-h1", delayed=True),
]


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(m=SAMPLES, data_parallel=FIXED), global_batch=SAMPLES)


@pytest.mark.parametrize(
    ("layout", "model"),
    [(layout, list(MODELS)[(2 * i + turn) % len(MODELS)]) for i, layout in enumerate(LAYOUTS) for turn in (0, 1)],
    ids=str,
)
def test_a_layout_in_fixed_order_has_the_bits_of_one_process(layout: Layout, model: str):
    """Losses, clipped gradients, norms, and after three steps weights; each layout with two of the models, in turn."""
    got = run(MODELS[model], replace(layout, data_parallel=FIXED), global_batch=SAMPLES)
    assert_same_bits(got, one_process(model))


@pytest.mark.parametrize("model", [SMALL_GPT2, SMALL_LLAMA], ids=["gpt2", "llama"])
def test_the_pipeline_changes_no_bit_in_float64(model: ModelConfig):
    """Where no sum is exact: so nothing but gradients, added in order, and the norm decides. Also beside tensor parallelism."""
    for tp in (1, 2):
        alone = run(model, Layout(tp=tp, m=4, data_parallel=FIXED), global_batch=8)
        for layout in (Layout(pp=2, m=4), Layout(pp=4, m=4, schedule="zb-h1")):
            assert_same_bits(run(model, replace(layout, tp=tp, data_parallel=FIXED), global_batch=8), alone)


def test_bits_are_compared_and_differ_without_the_fixed_order():
    """So that the tests above are known to see what they look for."""
    loose = run(MODELS["gpt2-float32"], Layout(dp=2, m=4), global_batch=SAMPLES)
    with pytest.raises(AssertionError):
        assert_same_bits(loose, one_process("gpt2-float32"))


@pytest.mark.parametrize("model", ["gpt2-bfloat16", "llama-float32"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, m=4, schedule="gpipe"),
        Layout(pp=2, m=4, schedule="zb-h1"),
        Layout(pp=4, m=4, schedule="gpipe", dp=2),
        Layout(pp=4, m=4, schedule="zb-h1", dp=2),
        Layout(pp=4, m=4, schedule="zb-h1", recompute="uniform 1"),
        Layout(tp=2, sp=True, pp=2, m=4, schedule="zb-h1"),
    ],
    ids=str,
)
def test_a_schedule_has_the_bits_of_1f1b_by_itself(layout: Layout, model: str):
    """Without the fixed order: gpipe and zb-h1 keep the order in which a rank adds up its microbatches."""
    steps = {"global_batch": 4 * layout.dp, "steps": 2}
    assert_same_bits(run(MODELS[model], layout, **steps), run(MODELS[model], _plain(layout), **steps))


def _plain(layout: Layout) -> Layout:
    return replace(layout, schedule="1f1b", recompute="none")


def test_an_infinite_gradient_makes_the_exact_norm_infinite_or_nan():
    """On a rank that speaks for it, or on one that holds a copy."""

    def norm(mesh, struck: int, value: float) -> float:
        chunk, _ = build(mesh, SMALL_GPT2, False)
        for p in chunk.module.parameters():
            p.main_grad.fill_(1.0)
        if mesh["world"].rank == struck:
            dict(chunk.module.named_parameters())[WORDS].main_grad[0, 0] = value
        return FlatOptimizer(chunk.buffers, OptimizerConfig(), mesh, fixed_order=True).grad_norm()

    count = sum(w.numel() for w in one_process("gpt2-float32").weights.values())
    assert run_ranks({"pp": 2}, lambda mesh: norm(mesh, 0, 1.0)) == [count**0.5] * 2
    for struck in (0, 1):
        norms = run_ranks({"pp": 2}, lambda mesh, struck=struck: norm(mesh, struck, float("inf")))
        assert all(not torch.tensor(x).isfinite() for x in norms)
