"""A schedule whose first and last stage are on rank 0: what asks for the last stage asks the stage map, not the last rank."""

from functools import partial

import pytest
from local_ranks import run_ranks
from promises.v_schedule.schedule import v_shaped
from script_run import settings_of, trainer_of
from tiny_run import pieces_of_chunks, put_together

import pretrain_gpt
from megatron.core.parallel.stage_to_rank import StageMap
from megatron.core.pipeline_parallel import SCHEDULES
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import split_and_defer_weight_grads
from megatron.core.pipeline_parallel.schedule.lower import add_reduce, add_transfers, check_rendezvous
from megatron.core.pipeline_parallel.schedule.registry import stage_map
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule

RUN = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --make-vocab-size-divisible-by 8 --fp64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --eval-iters 1 --eval-interval 10 --num-workers 0 "
    "--mock-data --tokenizer-type NullTokenizer --device cpu --log-interval 4 "
)
CHUNKS = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
V, LOOP = CHUNKS + "--pipeline-schedule v ", CHUNKS + "--pipeline-schedule interleaved "
ALONE, PIPELINE = {}, {"pp": 2}
UNTIED = "--untie-embeddings-and-output-weights "


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "v", v_shaped)


def weights(sizes: dict[str, int], flags: str) -> dict:
    """The whole model's after a run."""

    def work(mesh, flags: str) -> list:
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False) as trainer:
            trainer.run()
            buffers = [buffer for chunk in trainer.model for buffer in chunk.buffers if buffer.stage == 3]
            return pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {"owned_params": buffers})

    stages = settings_of(pretrain_gpt, RUN + flags)[0].stages
    return put_together(run_ranks(sizes, partial(work, flags=RUN + flags), stages=stages, delayed=bool(sizes)))


def assert_close(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name


def test_its_map_is_that_of_its_lists():
    for p in (1, 2, 3, 4):
        there = tuple(range(p))
        assert stage_map("v", p, 2) == StageMap(there + there[::-1])
        made = make_schedule("v", p, 3, 2)
        for schedule in (made, split_and_defer_weight_grads(made, delay=lambda rank: 2)):
            lowered = add_reduce(add_transfers(schedule))
            check_rendezvous(lowered)
            positions = [str(action) for action in lowered[0]]
            last = max(i for i, text in enumerate(positions) if text.startswith(("B", "W")))
            assert last < positions.index("REDUCE0"), "the table of the first stage is the last one's too"


def test_a_rank_with_more_stages_than_another_is_refused(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "v", lambda p, m, v: [v_shaped(1, m, 2)[0], []])
    with pytest.raises(ValueError, match=r"rank 0 has stages \[0, 1\], not 1 of 2"):
        make_schedule("v", 2, 2, 1)


@pytest.mark.parametrize("words", ["", UNTIED], ids=["tied", "untied"])
@pytest.mark.full
def test_a_run_logs_and_validates_once_where_the_last_stage_is(words, capsys):
    expected = weights(ALONE, words)
    alone = [line for line in capsys.readouterr().out.splitlines() if "lm loss" in line]
    assert_close(weights(PIPELINE, V + words), expected)
    got = [line for line in capsys.readouterr().out.splitlines() if "lm loss" in line]
    assert len(got) == len(alone) == 3, "a line of training, and at its end one of validation and one of the test set"
    losses = [[line.partition("lm loss")[2].split("|")[0] for line in lines] for lines in (got, alone)]
    assert losses[0] == losses[1]


@pytest.mark.full
@pytest.mark.parametrize("first, then", [(V, LOOP), (LOOP, V)], ids=["v to loop", "loop to v"])
def test_a_checkpoint_of_one_map_goes_on_in_the_other(first, then, tmp_path):
    saved = f"--save {tmp_path} --load {tmp_path} "
    weights(PIPELINE, first + saved + "--exit-interval 2")
    assert_close(weights(PIPELINE, then + saved), weights(ALONE, ""))


SHARDED = {"1": "", "2": "", "3 untied": UNTIED}


@pytest.mark.full
@pytest.mark.parametrize("name", SHARDED)
def test_gradients_are_summed_in_every_zero_stage(name):
    flags = f"{V} --zero-stage {name[0]} --overlap-grad-reduce --overlap-param-gather "
    assert_close(weights({"pp": 2, "dp": 2}, flags + SHARDED[name]), weights(ALONE, SHARDED[name]))


@pytest.mark.parametrize("flag", ["--zero-stage 3", "--fixed-order-grad-reduce"])
def test_what_a_table_of_two_stages_on_one_rank_cannot_do_is_refused(flag):
    with pytest.raises(RuntimeError, match=f"{flag}: .*--untie-embeddings-and-output-weights"):
        weights(PIPELINE, f"{V} {flag} ")
