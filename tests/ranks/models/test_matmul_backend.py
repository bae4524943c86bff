"""The 8-bit products of examples/fake_fp8 in every linear: any layout trains as one process does, and scales are state."""

import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from compiled_cases import as_written
from local_ranks import run_ranks
from measured_memory import SMALL, check
from same_code import ROOT
from script_run import trainer_of
from tiny_run import GPT, GPT2, LLAMA, SEQ, VOCAB, Layout, Outcome, assert_equal, run
from torch import Tensor
from whole_run import TINY

import pretrain_gpt
from megatron.core.dist_checkpointing import load_whole_tensors
from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.distributed.sync_persistent_module_buffers import ChangesAtStepEnd
from megatron.core.models.bert.bert_stage import BertModel
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.sharding.buffer_placement_and_sync import BufferPlacement
from megatron.core.sharding.placement import Placement
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import replace_linears
from megatron.core.tensor_parallel.linear_autograd import linear
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend
from megatron.core.transformer.layer_parallel_context import LayerContext
from tools.estimating.measure import measure

ZERO = partial(DataParallelConfig, overlap_grad_reduce=True, ddp_bucket_size=2000)
LAYOUTS = {
    "tp sp pp": Layout(tp=2, sp=True, pp=2, m=3),
    "tp sp zb": Layout(tp=2, sp=True, pp=2, m=3, schedule="zb-h1"),
    "vpp recomputed": Layout(pp=2, v=2, m=4, schedule="interleaved", recompute="uniform 1"),
    "cp zero 1": Layout(cp=2, dp=2, m=2, data_parallel=ZERO(zero_stage=1)),
    "tp zero 2 all parts": Layout(tp=2, dp=2, m=2, recompute="all parts", data_parallel=ZERO(zero_stage=2)),
    "zero 3 zb": Layout(pp=2, dp=2, m=2, schedule="zb-h1", data_parallel=DataParallelConfig(zero_stage=3)),
    "zero 3 sp recomputed": Layout(
        tp=2,
        sp=True,
        dp=2,
        m=2,
        recompute="uniform 1",
        data_parallel=DataParallelConfig(zero_stage=3, overlap_param_gather=True),
    ),
}


for folder in ("lora", "fake_fp8"):
    sys.path.insert(0, str(ROOT / "examples" / folder))
FP8 = importlib.import_module("fake_fp8")
SUBJECT = replace(GPT, make=lambda config, **parts: FP8.FakeFp8GPTModel(config, positions=SEQ, **parts))
MODELS = {"gpt2": GPT2, "llama": LLAMA}  # LayerNorm, biases and tied embeddings; grouped queries and a fused gate


@cache
def one_process(model: str) -> Outcome:
    return run(MODELS[model], Layout(), subject=SUBJECT, steps=3, global_batch=12)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[pytest.mark.full] * ((i + j) % 4 > 0))
        for i, name in enumerate(LAYOUTS)
        for j, model in enumerate(MODELS)
        if (i + j) % 2 == 0
    ],
)
def test_every_layout_trains_with_8_bits_as_one_process(name: str, model: str):
    got = run(MODELS[model], LAYOUTS[name], subject=SUBJECT, steps=3, global_batch=12)
    assert_equal(got, one_process(model), 1e-10)


def test_8_bits_are_not_the_plain_products():
    plain = run(GPT2, Layout(), steps=1, global_batch=12).losses[0]
    assert 1e-5 < abs(one_process("gpt2").losses[0] - plain) < 0.05 * plain


@pytest.mark.usefixtures(as_written.__name__)
@pytest.mark.parametrize("choice", ["regions", pytest.param("layers", marks=pytest.mark.full)])
def test_compiled_layers_call_the_backend(choice: str):
    """A product that saves its own takes no request for its input; whole layers, whose programs hold products, fall back."""
    got = run(replace(GPT2, compile=choice), Layout(), subject=SUBJECT, steps=3, global_batch=12)
    assert_equal(got, one_process("gpt2"), 1e-10)


def test_the_input_is_saved_in_8_bits_and_the_deferred_product_reads_them():
    x, weight = torch.randn(4, 2, 8, requires_grad=True), torch.nn.Parameter(torch.randn(6, 8))
    weight.main_grad = torch.zeros(6, 8)
    scales, store, saved = FP8.Scales(torch.float32, "cpu"), WeightGradStore(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x, weight, store=store, matmul=FP8.FakeFp8(), state=scales)
    assert sorted(t.numel() * t.element_size() for t in saved) == [0, x.numel(), 4 * weight.numel()]
    with store.collect() as works:
        y.sum().backward()
    assert not weight.main_grad.any()
    (work,) = works
    work()
    rounded = scales.rounded(x.detach(), FP8.INPUT).flatten(0, 1)  # [tokens, in]
    torch.testing.assert_close(weight.main_grad, torch.ones(6, 8) * rounded.sum(0))


def test_the_backend_of_the_page_trains_as_in_one_process():
    """docs/adding_a_model.md: weights in 8 bits, with a scale that follows the largest."""
    page = (ROOT / "docs" / "adding_a_model.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class RoundedWeights" in text)
    names: dict = {}
    exec(block, names)
    subject = replace(GPT, make=lambda config, **parts: names["RoundedGPTModel"](config, positions=SEQ, **parts))
    rounded = partial(run, LLAMA, subject=subject, steps=2, global_batch=6)
    assert_equal(rounded(Layout(tp=2, sp=True, pp=2, m=3)), rounded(Layout()), 1e-10)


class RowScales(ChangesAtStepEnd):
    """A scale for each row of a weight, wherever its parts are."""

    def __init__(self, placement, local_shape, dtype, device):
        super().__init__()
        out = placement.shape[0]
        if placement.shard.get("tp") == 1:  # each rank has a part of every row
            rows = Placement((out,), None, replicated_over=("tp",), partial_grad=("tp",))
        else:
            rows = Placement((out,), None, shard=placement.shard, blocks=placement.blocks, rows=placement.rows)
        self.register_buffer("scale", torch.full(local_shape[:1], 0.01, dtype=dtype, device=device))
        self.register_buffer("amax", torch.zeros(local_shape[:1], dtype=dtype, device=device))
        self.buffer_placements = {"amax": BufferPlacement("max", rows), "scale": BufferPlacement("copy", rows)}

    def rounded(self, weight: Tensor) -> Tensor:
        self.amax.copy_(torch.maximum(self.amax, weight.detach().abs().amax(-1)))
        scale = self.scale[:, None]
        return (weight / scale).round() * scale

    def end_of_step(self) -> None:
        self.scale.copy_(torch.where(self.amax > 0, self.amax / 127, self.scale))
        self.amax.zero_()


class RoundedRows(MatmulBackend):
    def state_of_part(self, placement, local_shape, dtype, device):
        return RowScales(placement, local_shape, dtype, device)

    def forward(self, x, weight, state):
        return x @ state.rounded(weight).t()

    def dgrad(self, grad, weight, state):
        return grad @ state.rounded(weight)

    def wgrad(self, grad, x, state):
        return grad.t() @ x


def test_a_state_has_a_value_for_each_row_of_a_rank():
    """Also of rows that pad a vocabulary, of fused blocks, and of a key and value head that two ranks share."""

    def make(config, *, context, **parts) -> GPTModel:
        return GPTModel(config, positions=SEQ, context=context.with_matmul_backend(RoundedRows()), **parts)

    config = replace(LLAMA, num_layers=2, num_query_groups=1)
    rounded = partial(run, config, subject=replace(GPT, make=make), steps=2, global_batch=4)
    assert_equal(rounded(Layout(tp=2, sp=True, m=2)), rounded(Layout(m=2)), 1e-10)


def test_a_backend_is_an_object():
    context = LayerContext(TensorParallel(ALONE), SampleDropoutKeys(0))
    with pytest.raises(TypeError, match=r"FakeFp8.* is no MatmulBackend; give an object of a class that inherits"):
        context.with_matmul_backend(FP8.FakeFp8)


def test_every_product_of_a_model_has_a_state_of_its_own():
    def names(mesh: Mesh) -> set[str]:
        context = LayerContext.from_mesh(mesh, torch.float64).with_matmul_backend(FP8.FakeFp8())
        bert = BertModel(replace(GPT2, num_layers=2), vocab_size=VOCAB, positions=SEQ, layers=range(2), context=context)
        return {name.removesuffix(".matmul_state").rpartition(".")[2] for name in FP8.states_of(bert)}

    (found,) = run_ranks({}, names)
    linears = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert linears < found and len(found - linears) >= 3, found  # head, pooler, next sentence


def test_an_exchanged_linear_keeps_its_state():
    def work(mesh: Mesh) -> None:
        context = LayerContext.from_mesh(mesh, torch.float64).with_matmul_backend(FP8.FakeFp8())
        model = GPT.make(GPT2, vocab_size=VOCAB, layers=range(1), context=context)
        before = FP8.states_of(model)

        class Forgetful(torch.nn.Module):
            def __init__(self, linear):
                super().__init__()
                self.weight, self.bias = linear.weight, linear.bias

        with pytest.raises(ValueError, match="must hold its state matmul_state itself"):
            replace_linears(model, lambda name, linear: Forgetful(linear))
        importlib.import_module("lora").add_lora(model, rank=2)
        assert FP8.states_of(model) == before

    run_ranks({}, work)


RUN = " --num-layers 4 --hidden-size 8 --num-attention-heads 2 --global-batch-size 4 --micro-batch-size 1 "
RUN += "--override-opt_param-scheduler --lr-decay-iters 9 "
RUNS = {
    "alone": ({}, ""),
    "tp pp": (
        {"tp": 2, "pp": 2},
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "zero 3": ({"dp": 2}, "--zero-stage 3"),
}


def train(layout: str, flags: str) -> dict[str, Tensor]:
    """The scales at the end, by name; all ranks of a stage have the same."""
    sizes, of_layout = RUNS[layout]
    spec = importlib.util.spec_from_file_location("own", ROOT / "examples" / "fake_fp8" / "pretrain.py")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    script = SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": own.model_provider})

    def train_rank(mesh: Mesh) -> dict[str, Tensor]:
        with trainer_of(script, mesh, " ".join(TINY) + RUN + of_layout + flags, predicts=False) as trainer:
            trainer._train()
            states = FP8.states_of
            return {name: state.scale for chunk in trainer.model for name, state in states(chunk.module).items()}

    ranks = run_ranks(sizes, train_rank)
    together = {name: scale for rank in ranks for name, scale in rank.items()}
    assert all(torch.equal(rank[name], together[name]) for rank in ranks for name in rank)
    return together


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp pp", pytest.param("zero 3", marks=pytest.mark.full)])
def test_scales_are_saved_resumed_to_the_bit_and_loaded_in_any_layout(layout: str, tmp_path):
    whole = train(layout, f" --train-iters 3 --save {tmp_path / 'whole'}")
    train(layout, f" --train-iters 2 --save {tmp_path / 'half'}")
    train(layout, f" --train-iters 3 --load {tmp_path / 'half'} --save {tmp_path / 'again'}")
    once, again = load_whole_tensors(tmp_path / "whole"), load_whole_tensors(tmp_path / "again")
    assert once.keys() == again.keys() and all(torch.equal(once[name], again[name]) for name in once)
    fresh = FP8.Scales(torch.float32, "cpu").scale
    assert len(whole) == 4 * 4 + 1 and not any((scale == fresh).any() for scale in whole.values())
    alone = train("alone", f" --train-iters 3 --load {tmp_path / 'whole'}")  # a load, and no step
    assert alone.keys() == whole.keys() and all(torch.equal(alone[name], whole[name]) for name in whole)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--world-size 2 --zero-stage 3",
        "--bf16 --world-size 2 --rank 1 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    ],
)
def test_memory_with_inputs_in_8_bits_is_predicted(flags: str):
    got = measure(f"{SMALL} {flags} --model {ROOT / 'examples/fake_fp8/pretrain.py'}".split())
    check(got.predicted, got.bytes, got.total, got.in_file)
