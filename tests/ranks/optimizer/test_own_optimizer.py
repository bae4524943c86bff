"""An optimizer of a fork's that computes with whole matrices, for the layers' matrices beside Adam for the rest, over layouts."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from layouts import Layout
from local_ranks import run_ranks
from tiny_run import TINY_GPT2, TINY_LLAMA, TinyTrainer, assert_equal, my_pieces, put_together, run

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed import DataParallelConfig
from megatron.core.optimizer import OPTIMIZERS, ParamGroup, UpdateRule
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.optimizer.param_groups import default_group
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.placement import Placement
from megatron.core.transformer.model_config import ModelConfig

ALL_AXES = Layout(tp=2, sp=True, pp=2, dp=2, m=2)


def level_update(parameters, gradients, states, step, wholes) -> None:
    """m = 0.9 m + g; w -= lr (m / |m| + decay w), |m| of the whole matrix."""
    for parameter, gradient, momentum, whole in zip(parameters, gradients, states["momentum"], wholes, strict=True):
        momentum.mul_(0.9).add_(gradient)
        matrix = whole.gather(momentum)
        assert matrix.shape == whole.shape and parameter.shape == gradient.shape == momentum.shape
        parameter.mul_(1 - step.lr * step.weight_decay).sub_(whole.part(matrix / matrix.norm()), alpha=step.lr)


@pytest.fixture(autouse=True)
def level(monkeypatch):
    monkeypatch.setitem(
        OPTIMIZERS, "level", UpdateRule(lambda _: level_update, lambda _: ("momentum",), needs_full_matrix=True)
    )


def group_of(name: str, placement: Placement) -> ParamGroup:
    group = default_group(name, placement)
    return replace(group, optimizer="level") if len(placement.shape) == 2 and ".layers." in name else group


def by_zero(layout: Layout, stage: int) -> Layout:
    return replace(layout, data_parallel=DataParallelConfig(zero_stage=stage))


@cache
def in_one_process(model: ModelConfig):
    return run(model, Layout(), group_of=group_of)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_an_update_of_whole_matrices_is_that_of_one_process_and_goes_on_from_its_checkpoint(stage: int, tmp_path):
    layout, expected = by_zero(ALL_AXES, stage), in_one_process(TINY_GPT2)

    def first_two_steps(mesh: Mesh) -> None:
        tiny = TinyTrainer(mesh, TINY_GPT2, layout, group_of=group_of, optimizer=OPTIMIZER)
        kinds = {kind: set(tensors) for kind, tensors in tiny.adam.tensors().items()}
        names = {name for buffer in tiny.buffers for name in buffer.parameters}
        assert kinds["momentum"] | kinds["exp_avg"] == names and not kinds["momentum"] & kinds["exp_avg"]
        assert kinds["exp_avg"] == kinds["exp_avg_sq"] and all(".layers." in name for name in kinds["momentum"])
        for number in range(2):
            tiny.step(number)
        tiny.save(tmp_path, 2)

    def last_step(mesh: Mesh, layout: Layout):
        tiny = TinyTrainer(mesh, TINY_GPT2, layout, group_of=group_of, optimizer=OPTIMIZER)
        tiny.load(tmp_path)
        result = tiny.step(2)
        return result.grad_norm, [piece for chunk in tiny.model for piece in my_pieces(chunk.module, mesh, lambda p: p)]

    run_ranks(layout.sizes, first_two_steps)
    for other in (layout, Layout(tp=2)):
        ranks = run_ranks(other.sizes, partial(last_step, layout=other))
        assert ranks[0][0] == pytest.approx(expected.norms[2], rel=1e-10)
        for name, weight in put_together([pieces for _, pieces in ranks]).items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-10, atol=1e-12)


OPTIMIZER = OptimizerConfig(clip_grad=0.5, weight_decay=0.1)  # that of `run`


@pytest.mark.full
@pytest.mark.parametrize("layout", [Layout(tp=4), by_zero(Layout(tp=2, dp=4, m=3), 1)], ids=str)
def test_key_value_heads_that_ranks_share_and_shards_that_hold_no_matrix_change_nothing(layout: Layout):
    assert_equal(run(TINY_LLAMA, layout, group_of=group_of), in_one_process(TINY_LLAMA), 1e-10)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_has_no_whole_matrix_is_refused(stage: int):
    layout = by_zero(Layout(dp=2), stage)
    with pytest.raises(RuntimeError) as refused:
        run_ranks(layout.sizes, lambda mesh: TinyTrainer(mesh, TINY_GPT2, layout, group_of=group_of))
    assert isinstance(refused.value.__cause__, ConfigError)
    for fact in ("level", "layers.", f"--zero-stage {stage}", "--zero-stage 1"):
        assert fact in str(refused.value)


def test_an_optimizer_that_is_in_no_table_is_refused():
    with pytest.raises(ConfigError, match=r"--optimizer: 'lamb'.*adam.*sgd.*level"):
        OptimizerConfig(optimizer="lamb")
