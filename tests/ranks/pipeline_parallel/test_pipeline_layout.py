"""--pipeline-model-parallel-layout, and interleaved chunks whose microbatches are no multiple of the pipeline ranks.

The stages of a text are those that Megatron core 0.19.0 makes of it (EXPECTED was read off its parser). Any layout has the
numbers of one process to 1e-10 in float64, resumes, and goes on in another layout. More layouts:

    python -m pytest tests/ranks/pipeline_parallel/test_pipeline_layout.py -m sweep
"""

import contextlib
import io
from functools import cache
from pathlib import Path

import pytest
from local_ranks import run_ranks
from script_run import settings_of, trainer_of
from tiny_run import pieces_of_chunks, put_together

import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.parse_pipeline_layout_string import stages_of_layout
from megatron.core.pipeline_parallel.layer_split import split_by_layout
from megatron.core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1 import interleaved
from megatron.core.pipeline_parallel.schedule.simulate import make_schedule, peak_live
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check

EXPECTED = {  # text -> letters of each stage
    "Et*3|(tt|)*6L": ["Ettt", *["tt"] * 6, "L"],
    "Et*2|(tt|)*5t|tL": ["Ett", *["tt"] * 5, "t", "tL"],
    "Et*7|t*7L": ["Ettttttt", "tttttttL"],
    "Ettt|(tt|)*3,L": ["Ettt", "tt", "tt", "tt", "L"],
    "E|(t|t)*2|L": ["E", "t", "tt", "t", "L"],
    "E(t*2|)*2tL": ["Ett", "tt", "tL"],
    "E||tL": ["E", "", "tL"],
    "E(|tt)*2,L": ["E", "tt", "ttL"],
    "Et|m|L": ["Et", "m", "L"],
}


@pytest.mark.parametrize("text", EXPECTED)
def test_a_text_has_the_stages_that_megatron_makes_of_it(text: str):
    assert stages_of_layout(text) == EXPECTED[text]


def test_a_layout_may_be_a_list_of_parts():
    assert stages_of_layout([["embedding", "decoder"], [], ["Decoder", "loss"]]) == ["Et", "", "tL"]
    with pytest.raises(ValueError, match=r"has expert; the parts of a stage are embedding, decoder, mtp, loss"):
        stages_of_layout([["expert"]])


def test_a_layout_gives_the_layers_of_each_stage():
    assert split_by_layout("Ett||t*3|L", 5, 4) == [range(2), range(2, 2), range(2, 5), range(5, 5)]


TWO = "--pipeline-model-parallel-size 2 --num-layers 4 --lr 1 --train-iters 1 --micro-batch-size 1 --seq-length 8 --mock-data "
TWO += "--tokenizer-type NullTokenizer --vocab-size 31 "
REFUSED = {
    "--pipeline-model-parallel-layout Ett|x*2L": "'Ett|x*2L' has x E t L |",
    "--pipeline-model-parallel-layout E(tt|)ttL": "( ) E t L",
    "--pipeline-model-parallel-layout Ett|t|tL": "3 stages multiple --pipeline-model-parallel-size (2) change one",
    "--pipeline-model-parallel-layout tEt|ttL": "one E start of its first stage",
    "--pipeline-model-parallel-layout Ett|tLt": "one L end of its last stage",
    "--pipeline-model-parallel-layout Ett|tL": "3 layers --num-layers is 4 change one",
    "--pipeline-model-parallel-layout Ettt|tmL": "several tokens (m) leave it out",
    "--pipeline-model-parallel-layout Ett|ttL --decoder-first-pipeline-num-layers 2": "contradicts leave out one or the other",
    "--pipeline-model-parallel-layout Ett|ttL --num-layers-per-virtual-pipeline-stage 1": "contradicts leave out",
    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3": (
        "num_microbatches (3) multiple of the pipeline size (2) --microbatch-group-size-per-virtual-pipeline-stage 3 1f1b"
    ),
    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4 --microbatch-group-size-per-virtual-pipeline-stage 1": (
        "(1) at least the pipeline size (2) at most num_microbatches (4)"
    ),
    "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4 --microbatch-group-size-per-virtual-pipeline-stage 3": (
        "(3) last group of 1 of num_microbatches (4) at least the pipeline size (2) give 4"
    ),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_layout_that_does_not_fit_is_refused(flags: str):
    with pytest.raises(ConfigError) as error:
        check(parse_args((TWO + flags).split()).config, 2)
    (problem,) = error.value.problems
    place = 0
    for word in REFUSED[flags].split():
        place = problem.find(word, place)
        assert place >= 0, f"{word!r} is not in {problem!r}, after what precedes it"


def test_groups_of_any_size_are_free_of_deadlock_and_have_the_predicted_microbatches_in_flight():
    for p, v, m, group in [
        (2, 2, 3, 3),
        (2, 3, 7, 2 + 3),
        (3, 2, 10, 7),
        (4, 2, 11, 6 + 1),
        (4, 3, 9, 5),
        (2, 2, 8, 4),
        (1, 2, 3, 2),
    ]:
        if 0 < m % group < p:
            continue
        schedule = make_schedule("interleaved", p, m, v, group)
        in_flight = [min(2 * (p - rank - 1) + (v - 1) * group + 1, v * m) for rank in range(p)]
        assert peak_live(schedule) == in_flight, (p, v, m, group)
        make_schedule("zb-interleaved", p, m, v, group)
    assert interleaved(2, 4, 2, 2) == interleaved(2, 4, 2)


# ---------------------------------------------------------------- whole runs

RUN = (
    "--num-layers 5 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --make-vocab-size-divisible-by 8 --fp64 "
    "--micro-batch-size 1 --global-batch-size 6 --train-iters 2 --lr 1e-2 --eval-iters 1 --eval-interval 1 --num-workers 0 "
    "--mock-data --tokenizer-type NullTokenizer --device cpu --log-interval 1 "
)
PP2 = "--pipeline-model-parallel-size 2 "
GROUPS = "--microbatch-group-size-per-virtual-pipeline-stage 3 "
LAYOUTS = {  # name -> (flags, sizes of the axes)
    "loss alone": (PP2 + "--pipeline-model-parallel-layout Ettttt|L --global-batch-size 6 ", {"pp": 2}),
    "a stage without layers, groups": (
        PP2 + "--pipeline-model-parallel-layout Ett||tt|tL --micro-batch-size 2 " + GROUPS,
        {"pp": 2},
    ),
    "embedding alone, TP": (
        PP2 + "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-layout E|tttt|t|L "
        "--pipeline-schedule zb-interleaved --micro-batch-size 2 " + GROUPS,
        {"pp": 2, "tp": 2},
    ),
    "ZeRO 1": (
        PP2 + "--pipeline-model-parallel-layout Et*3|ttL --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --recompute-granularity full --recompute-method uniform ",
        {"pp": 2, "dp": 2},
    ),
    "CP, zb-v": (
        PP2 + "--context-parallel-size 2 --pipeline-model-parallel-layout Et|t|tt|tL --pipeline-schedule zb-v ",
        {"pp": 2, "cp": 2},
    ),
}


def outcome(flags: str, sizes: dict[str, int], more: str = "", *, predicts: bool = False) -> tuple[dict, list[str]]:
    """The whole model after a run, and the losses that it printed."""
    flags = RUN + flags + more

    def work(mesh) -> list:
        with trainer_of(pretrain_gpt, mesh, flags, predicts=predicts) as trainer:
            trainer.run()
            return pieces_of_chunks(trainer.chunks, mesh, lambda p: p.data, {})

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        pieces = run_ranks(sizes, work, stages=settings_of(pretrain_gpt, flags)[0].stages)
    lines = [
        line.partition("lm loss")[2].split("|")[0] for line in printed.getvalue().splitlines() if "lm loss" in line
    ]
    return put_together(pieces), lines


@cache
def alone() -> tuple[dict, list[str]]:
    return outcome("", {})


def assert_same(got: tuple[dict, list[str]], expected: tuple[dict, list[str]], *, losses: int) -> None:
    """losses: how many of the last lines with losses are compared."""
    assert got[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert (got[0][name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name
    assert got[1][-losses:] == expected[1][-losses:] and len(got[1]) >= losses


FAST = ("a stage without layers, groups",)
SWEPT = ("loss alone", "CP, zb-v")


def marks_of(name: str) -> tuple:
    return () if name in FAST else pytest.mark.sweep if name in SWEPT else pytest.mark.full


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in LAYOUTS])
def test_numbers_are_those_of_one_process(name: str):
    """Weights, and the losses of training and validation; the run predicts its memory before it starts."""
    assert_same(outcome(*LAYOUTS[name], predicts=name in FAST), alone(), losses=5)


@pytest.mark.full
@pytest.mark.parametrize("way", [("embedding alone, TP", "ZeRO 1"), ("loss alone", "")], ids=" to ".join)
def test_a_checkpoint_goes_on_in_another_layout(way: tuple[str, str], tmp_path: Path):
    saved = f"--save {tmp_path} --load {tmp_path} "
    outcome(*LAYOUTS[way[0]], saved + "--exit-interval 1 ")
    assert_same(outcome(*LAYOUTS.get(way[1], ("", {})), saved), alone(), losses=3)
