"""Runs by zb-v and zb-interleaved equal one process: with shards, recompute and offload, across checkpoints, in generation.

test_parity.py has zb-v with tensor and sequence parallelism, tied tables and dropout, over a covering set.
"""

from functools import cache
from pathlib import Path

import pytest
from layouts import Layout
from local_ranks import run_ranks
from script_run import settings_of, trainer_of
from tiny_run import TINY_GPT2, Outcome, assert_equal, pieces_of_chunks, put_together, replace, run

import pretrain_gpt
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig

TOLERANCE = 1e-10
UNTIED = replace(TINY_GPT2, untie_embeddings_and_output_weights=True)
V, CHUNKS = {"schedule": "zb-v", "v": 2, "pp": 2}, {"schedule": "zb-interleaved", "v": 2, "pp": 2}
TP2SP = {"tp": 2, "sp": True}


def zero(stage: int, **more) -> dict:
    """Overlapped as far as the stage allows."""
    gathers = {"overlap_param_gather": True} if stage else {}
    return {
        "dp": 2,
        "data_parallel": DataParallelConfig(
            zero_stage=stage, overlap_grad_reduce=True, ddp_bucket_size=1500, **gathers, **more
        ),
    }


HYBRID = zero(3, num_distributed_optimizer_instances=2) | {"dp": 4}
LAYOUTS = {  # (settings of the layout, whether the table is tied)
    "zero 2": (V | zero(2) | {"m": 3, "recompute": "selective"}, True),
    "interleaved, TP": (CHUNKS | TP2SP | {"m": 2}, True),
    "zero 1, TP": (V | zero(1) | TP2SP | {"m": 2, "recompute": "uniform 1", "delayed": True}, True),
    "zero 2, offload": (V | zero(2) | {"m": 4, "offload": OffloadConfig(optimizer_cpu_offload=True)}, True),
    "zero 3": (V | zero(3) | {"m": 3, "recompute": "uniform 1", "delayed": True}, False),
    "zero 3, hybrid": (V | HYBRID | {"m": 2}, False),
    "interleaved, zero 2": (CHUNKS | zero(2) | {"m": 4, "recompute": "uniform 1"}, True),
}
FAST = ("zero 2",)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.full) for name in LAYOUTS]
)
def test_numbers_are_those_of_one_process(name: str):
    words, tied = LAYOUTS[name]
    model = TINY_GPT2 if tied else UNTIED
    assert_equal(run(model, Layout(**words), steps=2), one_process(tied), TOLERANCE)


@cache
def one_process(tied: bool) -> Outcome:
    return run(TINY_GPT2 if tied else UNTIED, Layout(), steps=2)


# ---------------------------------------------------------------- whole runs

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --make-vocab-size-divisible-by 8 --fp64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --eval-iters 1 --eval-interval 1 --num-workers 0 "
    "--mock-data --tokenizer-type NullTokenizer --device cpu --log-interval 2 "
)
ON_TWO = "--pipeline-model-parallel-size 2 "
SCHEDULES = {
    "zb-v": ON_TWO + "--pipeline-schedule zb-v ",
    "zb-interleaved": ON_TWO + "--pipeline-schedule zb-interleaved --num-virtual-stages-per-pipeline-rank 2 ",
    "zb-h1": ON_TWO + "--pipeline-schedule zb-h1 ",
    "uneven zb-v": ON_TWO
    + "--pipeline-schedule zb-v --num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split ",
    "alone": "",
}


def weights(schedule: str, more: str = "") -> dict:
    """The whole model's after a run."""
    flags = RUN + SCHEDULES[schedule] + more

    def work(mesh) -> list:
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False) as trainer:
            trainer.run()
            return pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {})

    sizes = {"pp": 2} if schedule != "alone" else {}
    return put_together(run_ranks(sizes, work, stages=settings_of(pretrain_gpt, flags)[0].stages))


@cache
def alone() -> dict:
    return weights("alone")


def assert_close(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= TOLERANCE * tensor.abs().max(), name


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("zb-interleaved", marks=pytest.mark.full)])
def test_a_run_trains_validates_and_logs_as_one_process(schedule: str, capsys):
    expected = weights("alone")
    alone = losses_in(capsys.readouterr().out)
    assert_close(weights(schedule), expected)
    assert losses_in(capsys.readouterr().out) == alone and len(alone) == 4


def losses_in(printed: str) -> list[str]:
    return [line.partition("lm loss")[2].split("|")[0] for line in printed.splitlines() if "lm loss" in line]


@pytest.mark.full
def test_the_embedding_and_the_loss_may_each_count_as_a_layer():
    assert_close(weights("uneven zb-v"), weights("alone", "--num-layers 6 "))


WAYS = [("zb-v", "zb-interleaved"), ("zb-h1", "zb-v"), ("zb-v", "alone")]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_a_checkpoint_goes_on_under_another_schedule(way: tuple[str, str], tmp_path: Path):
    saved = f"--save {tmp_path} --load {tmp_path} "
    weights(way[0], saved + "--exit-interval 1 ")
    assert_close(weights(way[1], saved), alone())
