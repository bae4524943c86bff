"""Runs that the checks of wrong numbers stop."""

import typing
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from layouts import Layout
from local_ranks import run_ranks
from script_run import trainer_of
from torch import Tensor

import pretrain_gpt
from megatron.core.parallel.mesh import Mesh
from megatron.training.trainer import Trainer

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 31 --micro-batch-size 1 --global-batch-size 4 --lr 0.01 --log-interval 1 --eval-iters 0 --device cpu "
    "--train-iters 4 "
)


def losing(spoil: Callable[[Trainer, int, Tensor], Tensor]):
    """pretrain_gpt's forward step with another loss. spoil(sample, loss) -> loss."""

    def forward_step(data, model):
        output, loss_func = pretrain_gpt.forward_step(data, model)
        mesh = model.mesh
        sample = next(m.keys.samples[0] for m in model.modules() if hasattr(m, "keys"))

        def spoiled(given):
            loss, *rest = loss_func(given)
            return spoil(sample, loss), *rest

        return output, spoiled if mesh.has_last_stage else loss_func

    return forward_step


def run(flags: str, *, spoil=lambda sample, loss: loss, prepare=lambda trainer: None, mesh: Mesh) -> Trainer:
    """Train on this rank; a run that stops raises."""
    script = SimpleNamespace(**{name: getattr(pretrain_gpt, name) for name in dir(pretrain_gpt)})
    script.forward_step = losing(spoil)
    with trainer_of(script, mesh, TINY + flags, predicts=False) as trainer:
        prepare(trainer)
        trainer.run()
    return trainer


ALONE = Layout()


def stopped(error: type, flags: str, layout: Layout = ALONE, **how) -> list[str]:
    """The message on each rank."""

    def work(mesh: Mesh) -> str:
        with pytest.raises(typing.get_args(error) or error) as caught:
            run(f"{flags} {' '.join(layout.flags)}", mesh=mesh, **how)
        return str(caught.value)

    return run_ranks(layout.sizes, work, stages=layout.stages if layout.pp > 1 else None)


def weights_of(trainer: Trainer) -> Tensor:
    """Those that this rank holds between two steps."""
    return torch.cat(
        [values for chunk in trainer.model for buffer in chunk.buffers for values in buffer.param_shard.tensors]
    ).clone()
