"""Initial values that follow from other weights: in any layout those of one process, from a base or drawn, and none at a resume."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of
from torch import Tensor, nn
from whole_run import TINY

import pretrain_gpt
from megatron.core.dist_checkpointing import load_whole_tensors
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.gather_and_split_whole_tensors import part_of_whole, whole_tensor
from megatron.core.sharding.initial_values import InitializesFromWeights
from megatron.core.sharding.placement import Constant, Placement
from megatron.core.tensor_parallel.exchange_parallel_linears_for_adapters import replace_linears
from megatron.core.tensor_parallel.linear_layers import ColumnParallelLinear

MODEL = " --num-layers 2 --hidden-size 24 --num-attention-heads 4 --override-opt_param-scheduler --lr-decay-iters 9 "
LLAMA = (
    "--group-query-attention --num-query-groups 1 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
)
ROWS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")


class Weighed(InitializesFromWeights):
    """A linear whose outputs are multiplied by the norms of its weight's rows, and whose weight begins halved."""

    calls: ClassVar[list[str]] = []

    def __init__(self, name: str, linear: nn.Module):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.matmul_state = linear.matmul_state
        object.__setattr__(self, "linear", linear)
        self.name, self.tp = name, linear.tp
        of_weight = linear.weight.placement
        if isinstance(linear, ColumnParallelLinear):
            placement = replace(of_weight, shape=of_weight.shape[:1], init=Constant(7.0))
        else:
            partial = ("tp",) if self.tp.sequence_parallel else ()
            placement = Placement(of_weight.shape[:1], Constant(7.0), replicated_over=("tp",), partial_grad=partial)
        self.norms = self.tp.parameter((len(linear.weight),), placement)

    def initialize_from_weights(self) -> None:
        self.calls.append(self.name)
        norms = whole_tensor(self.weight, self.tp.axis).norm(dim=1)
        self.norms.copy_(part_of_whole(norms, self.norms, self.tp.axis))
        self.weight.mul_(0.5)

    def forward(self, x: Tensor):
        y, bias = self.linear(x)
        return y * self.norms, bias


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    replace_linears(model, Weighed, output_layer=True)
    return model


WEIGHED = SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": model_provider})


def train(script, sizes: dict[str, int], flags: str) -> None:
    def train_rank(mesh: Mesh) -> None:
        with trainer_of(script, mesh, " ".join(TINY) + MODEL + flags, predicts=False) as trainer:
            trainer._train()

    groups = 2 if "--num-query-groups 1" in flags and sizes.get("tp", 1) == 2 else 1
    run_ranks(sizes, train_rank, ranks_per_kv_head=groups)


STILL = " --lr 1e-30"  # a step that changes no value but 0
TP2 = " --tensor-model-parallel-size 2"
LAYOUTS = {
    "tp sp pp": ({"tp": 2, "pp": 2}, f"{TP2} --sequence-parallel --pipeline-model-parallel-size 2"),
    "zero 1": ({"dp": 2}, " --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
    "zero 3": ({"dp": 2}, " --zero-stage 3"),
    "tp zero 3": ({"tp": 2, "dp": 2}, f"{TP2} --zero-stage 3 --overlap-param-gather --overlap-grad-reduce"),
}


def saved(folder: Path) -> dict[str, Tensor]:
    return load_whole_tensors(folder)


def assert_derived(tensors: dict[str, Tensor], base: dict[str, Tensor], **how) -> None:
    """Against the base's weights, as formulas say."""
    weights = [name for name in base if name.split(".")[-2] in ROWS and name.endswith("weight") and "model/" in name]
    assert len(weights) in (8, 9)
    for name in weights:
        norms = tensors[name.replace("output_layer", "output_layer.linear").replace("weight", "norms")]
        torch.testing.assert_close(norms, base[name].to(norms.dtype).norm(dim=1), **how)
        torch.testing.assert_close(tensors[name], base[name] / 2, **how)


@pytest.mark.full
@pytest.mark.parametrize("model", ["", pytest.param(LLAMA, marks=pytest.mark.full)], ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] * (i in (1, 2))) for i, name in enumerate(LAYOUTS)]
)
def test_values_are_those_of_the_base_in_any_layout_and_not_set_again_at_a_resume(layout, model, tmp_path):
    sizes, flags = LAYOUTS[layout]
    flags += f" --fp64 {model} --train-iters"
    train(pretrain_gpt, {}, f" --fp64 {model} --train-iters 1 --save {tmp_path / 'base'}")
    begin = f"{flags} 1 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    Weighed.calls.clear()
    train(WEIGHED, sizes, f"{begin} {STILL} --save {tmp_path / 'begun'}")
    ranks_of_a_layer = sizes.get("tp", 1) * sizes.get("dp", 1)
    num_modules = 9 if model else 8  # the last is an output layer with a weight of its own
    assert len(Weighed.calls) == num_modules * ranks_of_a_layer, "once on each rank that has the module"
    base = saved(tmp_path / "base")
    assert_derived(saved(tmp_path / "begun"), base, rtol=1e-14, atol=1e-15)

    # without a base: from drawn weights
    train(WEIGHED, sizes, f"{flags} 1 {STILL} --save {tmp_path / 'drawn'}")
    train(pretrain_gpt, {}, f" --fp64 {model} {STILL} --train-iters 1 --save {tmp_path / 'of_seed'}")
    assert_derived(saved(tmp_path / "drawn"), saved(tmp_path / "of_seed"), rtol=1e-14, atol=1e-15)

    # a resume, and a run from the weights of a checkpoint that has all of them, have what was saved
    Weighed.calls.clear()
    train(WEIGHED, sizes, f"{flags} 2 {STILL} --load {tmp_path / 'begun'} --save {tmp_path / 'again'}")
    train(WEIGHED, sizes, f"{flags} 1 {STILL} --finetune --load {tmp_path / 'begun'} --save {tmp_path / 'tuned'}")
    assert not Weighed.calls
    before = saved(tmp_path / "begun")
    for folder in ("again", "tuned"):
        after = saved(tmp_path / folder)
        for name, x in before.items():
            if name.startswith("model/"):
                torch.testing.assert_close(after[name], x, rtol=0, atol=1e-25)  # a bias of 0 moves by the step's 1e-30


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ({"dp": 2}, "--use-distributed-optimizer"),
        pytest.param({"dp": 2}, "--zero-stage 3", marks=pytest.mark.full),
        pytest.param({}, "--reuse-fp32-param", marks=pytest.mark.full),
        pytest.param({}, "--optimizer-cpu-offload", marks=pytest.mark.full),
    ],
)
def test_masters_of_half_precision_follow(sizes, flags, tmp_path):
    """Else the first update would round the old masters into the weights."""
    train(pretrain_gpt, {}, f" --bf16 --train-iters 1 --save {tmp_path / 'base'}")
    begin = f" --bf16 --train-iters 2 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    train(WEIGHED, sizes, f"{begin} {flags} {STILL} --save {tmp_path / 'begun'}")
    tensors, base = saved(tmp_path / "begun"), saved(tmp_path / "base")
    assert_derived(tensors, base, rtol=1e-2, atol=1e-6)
    for name, master in tensors.items():
        if name.startswith("optimizer/master/") and ("linear" in name or "output_layer" in name) and "bias" not in name:
            assert torch.equal(master.bfloat16(), tensors[name.replace("optimizer/master", "model")])


def test_a_base_that_is_not_saved_may_not_be_changed(tmp_path):
    def frozen(pre_process=True, post_process=True, vp_stage=None):
        model = model_provider(pre_process, post_process, vp_stage)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("norms"))
        return model

    script = SimpleNamespace(**vars(pretrain_gpt) | {"model_provider": frozen})
    train(pretrain_gpt, {}, f" --train-iters 1 --save {tmp_path / 'base'}")
    begin = f" --train-iters 1 --pretrained-checkpoint {tmp_path / 'base'} --allow-missing-tensors"
    with pytest.raises(RuntimeError, match="initialize_from_weights has changed frozen weights"):
        train(script, {}, f"{begin} --no-save-frozen --save {tmp_path / 'adapters'}")


def test_a_part_is_taken_of_a_whole_alone():
    def work(mesh: Mesh) -> None:
        parameter = nn.Parameter(torch.arange(6.0).view(3, 2) + 6 * mesh["tp"].rank)
        parameter.placement = Placement((5, 2), None, shard={"tp": 0})  # of 5 rows, so that the last is padding
        whole = whole_tensor(parameter, mesh["tp"])
        assert whole.tolist() == torch.arange(10.0).view(5, 2).tolist() and not whole.requires_grad
        part = part_of_whole(-whole, parameter, mesh["tp"])
        expected = -parameter.detach()
        if not mesh["tp"].is_first:
            expected[2] = 0
        assert torch.equal(part, expected)
        with pytest.raises(ValueError, match=r"shape \(3, 2\) for a parameter of which the whole has \(5, 2\)"):
            part_of_whole(part, parameter, mesh["tp"])

    run_ranks({"tp": 2}, work)
