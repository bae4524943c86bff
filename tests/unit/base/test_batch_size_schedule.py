"""Sizes of steps against hand-counted ramps and against Megatron's rule, written down once more."""

from dataclasses import replace

import pytest
from said import tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.global_batch_size_schedule import BatchSizes, constant_size, parse_sizes_by_tokens, ramp
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.config import Config
from megatron.training.arguments.validation import check


def run_of(sizes: BatchSizes, steps: int) -> list[int]:
    consumed, made = 0, []
    for _ in range(steps):
        made.append(sizes.at(consumed))
        consumed += made[-1]
    return made


# (start, increment, samples), last size, the first steps
RAMPS = [
    ((4, 4, 60), 16, [4, 4, 4, 4, 4, 8, 8, 8, 12, 12, 16, 16]),  # at 0 .. 16 | 20 28 36 | 44 56 | 68
    ((2, 2, 12), 8, [2, 2, 4, 6, 8, 8]),  # stages at 0, 4 and 8; from 12 on the last size
    ((2, 3, 1), 8, [2, 8, 8]),  # the ramp is over before the second step
    ((1, 1, 6), 4, [1, 1, 2, 3, 4]),
    ((16, 16, 100), 32, [16] * 7 + [32]),
]


@pytest.mark.parametrize(("given", "size", "steps"), RAMPS)
def test_a_ramp_has_the_hand_counted_sizes(given, size, steps):
    assert run_of(ramp(*given, size), len(steps)) == steps


STARTS_AND_SIZES = [
    (4, 4, 60, 16),
    (1, 1, 7, 64),
    (3, 1, 100, 52),
    (16, 16, 5000, 768),
    (2, 2, 999, 98),
    (1, 1, 49, 50),
    (32, 32, 977, 1504),
]


@pytest.mark.parametrize(("start", "increment", "samples", "size"), STARTS_AND_SIZES)
def test_a_ramp_is_megatrons_to_the_rounding_of_its_division(start, increment, samples, size):
    """The size that a step has after c samples: the last one if c > SAMPLES, else START + int(c / (SAMPLES / stages)) INCREMENT."""
    per_stage = samples / ((size - start) // increment)
    sizes = ramp(start, increment, samples, size)
    for consumed in range(samples + 2 * size):
        expected = size if consumed > samples else start + int(consumed / per_stage) * increment
        assert sizes.at(consumed) == expected, consumed


def test_a_table_is_read_in_tokens():
    table = parse_sizes_by_tokens("0:768 250B:1536 500B:3072 750B:6144", seq_length=8192)
    assert table.rows == ((0, 768), (30_517_578, 1536), (61_035_156, 3072), (91_552_734, 6144))
    assert [table.at(n) for n in (0, 30_517_577, 30_517_578, 10**9)] == [768, 768, 1536, 6144]
    assert parse_sizes_by_tokens("1.5k:8,0:4 2M:2K", 10).rows == ((0, 4), (150, 8), (200_000, 2000))
    assert parse_sizes_by_tokens("0:8 1T:16", 1).rows == ((0, 8), (10**12, 16))


# sizes, samples, steps that fit
LENGTHS = [
    (constant_size(8), 80, 10),
    (constant_size(8), 87, 10),
    (constant_size(8), 7, 0),
    (ramp(4, 4, 60, 16), 68 + 33, 12),  # 10 steps of the ramp, two of 16
    (ramp(4, 4, 60, 16), 67, 9),  # it ends within the ramp, before the second step of 12
    (ramp(2, 3, 1, 8), 26, 4),  # 2 8 8 8
    (parse_sizes_by_tokens("0:16 100:8", 1), 110, 6),  # after 96 a step of 16 does not fit, though one of 8 would
    (parse_sizes_by_tokens("0:16 100:8", 1), 120, 8),
]


@pytest.mark.parametrize(("sizes", "samples", "count"), LENGTHS)
def test_the_steps_of_a_run_are_those_that_fit(sizes: BatchSizes, samples: int, count: int):
    assert sizes.steps(0, samples) == count
    made = run_of(sizes, count + 1)
    assert sum(made[:-1]) <= samples < sum(made)
    for done in range(count):  # and what is left of them, from any step on
        assert sizes.steps(sum(made[:done]), samples) == count - done


def test_megatrons_number_of_steps():
    """Its loop over the ramp, then whole steps of the last size."""
    for samples in (5000, 7777, 100_000):
        sizes, consumed, count = ramp(16, 16, 5000, 768), 0, 0
        while consumed <= 5000:
            consumed, count = consumed + sizes.at(consumed), count + 1
        if samples >= consumed:
            assert sizes.steps(0, samples) == count + (samples - consumed) // 768


def test_sizes_are_rounded_down_where_asked():
    sizes = replace(ramp(4, 3, 60, 16), multiple=4)  # asked for 4 7 10 13 16, stages of 15
    assert sizes.sizes == [4, 4, 8, 12, 16]
    assert run_of(sizes, 14) == [4] * 8 + [8, 8, 12, 16, 16, 16]  # the stages begin at 30, 45 and 60: at 32, 48 and 60
    assert replace(constant_size(10), multiple=4).last == 8


MAKERS_AND_PROBLEMS = [
    (lambda: ramp(4, 0, 9, 8), "--rampup-batch-size 4 0 9 START INCREMENT SAMPLES 1"),
    (lambda: ramp(8, 4, 9, 8), "--rampup-batch-size 8 4 9 START --global-batch-size"),
    (lambda: ramp(4, 3, 9, 8), "--rampup-batch-size 4 3 9 --global-batch-size 8 START INCREMENT"),
    (lambda: parse_sizes_by_tokens("0:4 1X:8", 4), "--step-batch-size-schedule 0:4 1X:8 TOKENS:SIZE 250B:1536"),
    (lambda: parse_sizes_by_tokens("8:4", 4), "--step-batch-size-schedule 8:4 0 0:SIZE"),
    (lambda: parse_sizes_by_tokens("0:4 3:8", 4), "--step-batch-size-schedule 0:4 3:8 --seq-length 4"),
    (lambda: parse_sizes_by_tokens("0:0", 4), "--step-batch-size-schedule 0:0 1"),
    (lambda: parse_sizes_by_tokens("", 4), "--step-batch-size-schedule 0 0:SIZE"),
]


@pytest.mark.parametrize(("make", "problem"), MAKERS_AND_PROBLEMS)
def test_what_cannot_be_is_explained(make, problem: str):
    with pytest.raises(ConfigError) as error:
        make()
    assert tells_each(error.value.problems, problem)


# ---------------------------------------------------------------- rules with the rest of the settings

RUN = (
    "--num-layers 4 --seq-length 32 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 "
    "--micro-batch-size 2 "
)


def config_of(line: str) -> Config:
    return parse_args((RUN + line).split(" "))[0]


def problems_of(line: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check(config_of(line), world_size)
    return error.value.problems


RULES = [
    ("--train-iters 5 --train-samples 5", 1, "--train-iters --train-samples"),
    (
        "--train-iters 50 --lr-decay-samples 8 --lr-warmup-samples 2 --rampup-batch-size 2 2 8 --global-batch-size 4",
        1,
        "--lr-decay-samples --train-samples --train-iters --lr-decay-iters|--lr-warmup-samples --train-samples --train-iters --lr-warmup-iters|--rampup-batch-size --train-samples --train-iters",
    ),
    (
        "--train-samples 50 --lr-decay-iters 8 --lr-warmup-iters 2 --lr-decay-style WSD --lr-wsd-decay-iters 3",
        1,
        "--lr-decay-iters --train-iters --train-samples --lr-decay-samples|--lr-warmup-iters --train-iters --train-samples --lr-warmup-samples|--lr-wsd-decay-iters --train-iters --train-samples --lr-wsd-decay-samples",
    ),
    ("--train-samples 90 --lr-warmup-samples 100", 1, "100 90 --lr-warmup-samples --lr-decay-samples"),
    ("--train-samples 3 --global-batch-size 4", 1, "--train-samples 3 4"),
    (
        "--train-samples 900 --global-batch-size 16 --rampup-batch-size 4 2 60",
        2,
        "--rampup-batch-size 6 10 14 4 --micro-batch-size 2 --decrease-batch-size-if-needed",
    ),
    (
        "--train-samples 900 --global-batch-size 16 --rampup-batch-size 2 2 60 --decrease-batch-size-if-needed",
        2,
        "4 --micro-batch-size 2",
    ),
    (
        "--train-samples 900 --global-batch-size 16 --rampup-batch-size 4 2 60 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        2,
        "6 num_microbatches 3 2 1f1b --global-batch-size",
    ),
    (
        "--train-samples 900 --global-batch-size 16 --step-batch-size-schedule 0:4",
        1,
        "--step-batch-size-schedule --global-batch-size",
    ),
    (
        "--train-samples 900 --rampup-batch-size 1 1 60",
        2,
        "--rampup-batch-size 1 2 3 4 --micro-batch-size --decrease-batch-size-if-needed|--rampup-batch-size --global-batch-size",
    ),
]


@pytest.mark.parametrize(("line", "world_size", "problems"), RULES, ids=[line for line, _, _ in RULES])
def test_sizes_that_do_not_fit_the_run_are_found_before_it(line: str, world_size: int, problems: str):
    assert tells_each(problems_of(line, world_size), problems)


def test_steps_follow_from_samples():
    def steps(line: str, world_size: int = 1) -> int:
        config = config_of(line)
        check(config, world_size)
        return config.train_iters(world_size)

    ramped = "--train-samples 101 --global-batch-size 16 --rampup-batch-size 4 4 60"
    assert steps("--train-iters 7") == 7
    assert steps("--train-samples 47 --global-batch-size 8") == 5
    assert steps(ramped) == steps(ramped, world_size=2) == 12
    assert config_of(ramped).global_batch_size(2) == 16
    table = config_of("--train-samples 101 --step-batch-size-schedule 0:4,640:8").batch_sizes(1)
    assert table.rows == ((0, 4), (20, 8))  # 640 tokens are 20 samples of 32
