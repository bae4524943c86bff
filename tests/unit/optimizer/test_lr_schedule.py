"""The learning rate against the closed forms of Megatron's schedule, counted in samples."""

import json
import math
from dataclasses import asdict

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.lr_wd_schedule_by_samples import (
    LearningRateConfig,
    LearningRateSchedule,
    RunLength,
    WeightDecaySchedule,
    learning_rate_schedule,
    schedule_in_force,
)

BATCH, ITERS = 4, 100  # 400 samples


def schedule(train_iters: int = ITERS, **settings) -> LearningRateSchedule:
    return learning_rate_schedule(LearningRateConfig(**settings), RunLength(train_iters, "iters", BATCH))


# settings, then {samples: rate}
TABLE = [
    ({"lr": 1.0, "lr_decay_style": "constant"}, {0: 1, 1: 1, 400: 1, 401: 1, 10_000: 1}),
    ({"lr": 1.0, "lr_decay_style": "constant", "lr_warmup_iters": 10}, {0: 0, 4: 0.1, 20: 0.5, 40: 1, 41: 1, 900: 1}),
    # ln(1 + iterations) / ln 8, complete after 7 of 8
    (
        {"lr": 1.0, "lr_decay_style": "constant", "lr_warmup_style": "log", "lr_warmup_iters": 8},
        {0: 0, 4: 1 / 3, 12: 2 / 3, 28: 1, 32: 1, 400: 1},
    ),
    ({"lr": 1.0}, {0: 1, 100: 0.75, 200: 0.5, 300: 0.25, 400: 0, 401: 0, 4000: 0}),
    ({"lr": 1.0, "min_lr": 0.2}, {0: 1, 200: 0.6, 400: 0.2, 401: 0.2, 4000: 0.2}),
    ({"lr": 1.0, "min_lr": 0.2, "lr_warmup_iters": 20}, {0: 0, 40: 0.5, 80: 1, 240: 0.6, 400: 0.2, 404: 0.2}),
    ({"lr": 1.0, "lr_decay_iters": 50}, {0: 1, 100: 0.5, 200: 0, 204: 0, 400: 0}),
    ({"lr": 1.0, "lr_decay_iters": 200}, {0: 1, 400: 0.5}),
    ({"lr": 2.0, "lr_decay_style": "cosine"}, {0: 2, 100: 1 + math.sqrt(0.5), 200: 1, 300: 1 - math.sqrt(0.5), 400: 0}),
    ({"lr": 1.0, "min_lr": 0.1, "lr_decay_style": "cosine", "lr_warmup_iters": 20}, {0: 0, 80: 1, 240: 0.55, 400: 0.1}),
    ({"lr": 1.0, "lr_warmup_fraction": 0.25}, {0: 0, 50: 0.5, 100: 1, 250: 0.5, 400: 0}),
    ({"lr": 1.0, "lr_warmup_fraction": 0.25, "lr_decay_iters": 40}, {0: 0, 20: 0.5, 40: 1, 100: 0.5, 160: 0, 164: 0}),
    ({"lr": 1.0, "lr_warmup_fraction": 0.001}, {0: 0, 1: 1 - 0.6 / 399.6, 4: 1 - 3.6 / 399.6}),
    ({"lr": 1.0, "lr_warmup_fraction": 0.0}, {0: 1, 200: 0.5}),
    ({"lr": 1.0, "lr_warmup_init": 0.2, "lr_warmup_iters": 10}, {0: 0.2, 20: 0.6, 40: 1}),
    ({"lr": 1.0, "lr_warmup_init": 0.2}, {0: 1}),
    ({"lr": 1.0, "min_lr": 0.5, "lr_decay_style": "constant"}, {0: 1, 4000: 1}),
    # lr sqrt(warm-up / samples), never below min_lr; at sample 0 and without a warm-up both count as 1
    (
        {"lr": 1.0, "lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4},
        {0: 0, 8: 0.5, 16: 1, 64: 0.5, 100: 0.4, 256: 0.25, 400: 0.2, 401: 0},
    ),
    (
        {"lr": 1.0, "min_lr": 0.3, "lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4},
        {64: 0.5, 256: 0.3, 401: 0.3},
    ),
    ({"lr": 1.0, "lr_decay_style": "inverse-square-root"}, {0: 1, 1: 1, 4: 0.5, 100: 0.1, 400: 0.05, 404: 0}),
    # the last 25 iterations, samples 300 to 400, of 100
    (
        {"lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 25, "lr_warmup_iters": 10},
        {0: 0, 20: 0.5, 40: 1, 41: 1, 300: 1, 350: 2**0.5 - 1, 400: 0, 401: 0},
    ),
    (
        {"lr": 1.0, "min_lr": 0.2, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 25, "lr_wsd_decay_style": "linear"},
        {0: 1, 300: 1, 325: 0.8, 350: 0.6, 375: 0.4, 400: 0.2, 401: 0.2},
    ),
    (
        {"lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 25, "lr_wsd_decay_style": "cosine"},
        {300: 1, 325: 0.5 + 0.125**0.5, 350: 0.5, 375: 0.5 - 0.125**0.5, 400: 0},
    ),
    (
        dict(lr=1.0, min_lr=0.2, lr_decay_style="WSD", lr_wsd_decay_iters=25, lr_wsd_decay_style="minus_sqrt"),
        {300: 1, 301: 0.92, 325: 0.6, 336: 0.52, 400: 0.2, 500: 0.2},
    ),
    (
        dict(lr=3.0, lr_decay_style="WSD", lr_wsd_decay_iters=100, lr_wsd_decay_style="linear", lr_warmup_iters=25),
        {0: 0, 50: 1.5, 100: 3, 101: 3 * 299 / 400, 200: 1.5},
    ),  # it would have begun to fall with the run
]


@pytest.mark.parametrize(("settings", "rates"), TABLE)
def test_the_rate_is_the_closed_form(settings: dict, rates: dict[int, float]):
    plan = schedule(**settings)
    assert {samples: plan.at(samples) for samples in rates} == pytest.approx(rates, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [{}, {"lr_warmup_iters": 7}, {"lr_warmup_fraction": 0.33, "lr_warmup_init": 1e-4}])
def test_every_sample_count_has_megatrons_rate(style: str, warmup: dict):
    """Written down once more, straight: warm-up while samples <= warm-up, then the decay, then the lowest rate."""
    lr, low, init = 3e-3, 1e-5, warmup.get("lr_warmup_init", 0.0)
    decay = 60 * BATCH
    rise = warmup.get("lr_warmup_iters", 0) * BATCH or warmup.get("lr_warmup_fraction", 0) * decay
    plan = schedule(lr=lr, min_lr=low, lr_decay_style=style, lr_decay_iters=60, **warmup)
    for samples in range(0, 2 * decay):
        if rise and samples <= rise:
            expected = init + (lr - init) * samples / rise
        elif style == "constant":
            expected = lr
        elif samples > decay:
            expected = low
        else:
            x = (samples - rise) / (decay - rise)
            expected = low + (lr - low) * {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2}[style]
        assert plan.at(samples) == pytest.approx(expected, rel=1e-12)


# settings of a run of 400 samples, none of which depends on the size of a batch
IN_SAMPLES = [
    ({"lr": 1.0}, {0: 1, 100: 0.75, 400: 0, 401: 0}),
    ({"lr": 1.0, "lr_decay_samples": 200, "lr_warmup_samples": 50}, {0: 0, 25: 0.5, 50: 1, 125: 0.5, 200: 0, 201: 0}),
    ({"lr": 1.0, "lr_warmup_fraction": 0.25}, {50: 0.5, 100: 1, 250: 0.5}),
    (
        {"lr": 1.0, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 40, "lr_wsd_decay_style": "linear"},
        {360: 1, 390: 0.25},
    ),
    ({"lr": 1.0, "lr_decay_style": "inverse-square-root", "lr_warmup_samples": 9}, {9: 1, 36: 0.5, 81: 1 / 3}),
]


@pytest.mark.parametrize(("settings", "rates"), IN_SAMPLES)
def test_a_run_counted_in_samples_has_the_same_closed_forms(settings: dict, rates: dict[int, float]):
    plan = learning_rate_schedule(LearningRateConfig(**settings), RunLength(400, "samples", BATCH))
    assert {samples: plan.at(samples) for samples in rates} == pytest.approx(rates, rel=1e-12, abs=1e-15)


# style, then {samples: weight decay} on the way from 0.1 to 0.3 over 400 samples
WEIGHT_DECAYS = [
    ("constant", {0: 0.3, 200: 0.3, 4000: 0.3}),
    ("linear", {0: 0.1, 1: 0.1005, 100: 0.15, 200: 0.2, 400: 0.3, 401: 0.3}),
    (
        "cosine",
        {0: 0.1, 100: 0.2 - 0.1 * math.sqrt(0.5), 200: 0.2, 300: 0.2 + 0.1 * math.sqrt(0.5), 400: 0.3, 401: 0.3},
    ),
]


@pytest.mark.parametrize(("style", "values"), WEIGHT_DECAYS)
def test_the_weight_decay_is_the_closed_form(style, values: dict[int, float]):
    plan = WeightDecaySchedule(0.1, 0.3, style, 400)
    assert {samples: plan.at(samples) for samples in values} == pytest.approx(values, rel=1e-12)


def test_a_resumed_run_follows_what_a_flag_says_and_else_refuses_another_schedule():
    def config(**flags) -> LearningRateConfig:
        return LearningRateConfig(lr=1.0, **flags)

    saved = json.loads(json.dumps(asdict(schedule(lr=1.0, lr_warmup_fraction=1 / 3))))
    mine, theirs = schedule(lr=2.0, lr_decay_iters=200), schedule(lr=1.0, lr_warmup_fraction=1 / 3)
    at = {"what": "learning rate", "samples": 200}
    assert schedule_in_force(mine, None, config(), **at) == mine
    assert schedule_in_force(theirs, saved, config(), **at) == theirs, "floats survive JSON"
    assert schedule_in_force(mine, saved, config(override_opt_param_scheduler=True), **at) == mine
    assert schedule_in_force(mine, saved, config(use_checkpoint_opt_param_scheduler=True), **at) == theirs
    with pytest.raises(ConfigError) as error:
        schedule_in_force(mine, saved, config(), **at)
    (problem,) = error.value.problems
    assert tells(problem, "1 2 133.333 0 400 800")
    assert tells(problem, "--override-opt_param-scheduler 1.5")
    assert tells(problem, "--use-checkpoint-opt_param-scheduler 0.75")


def test_a_longer_run_is_told_of_its_length_with_numbers_as_they_were_meant():
    """0.01 of 2240 samples is 22.400000000000002 in a computer. Two numbers that few digits cannot tell apart have more."""

    def told(before: LearningRateSchedule, now: LearningRateSchedule) -> str:
        with pytest.raises(ConfigError) as error:
            schedule_in_force(now, asdict(before), LearningRateConfig(lr=1.0), what="learning rate", samples=2240)
        return str(error.value)

    done, longer = (schedule(iters, lr=1.0, lr_warmup_fraction=0.01) for iters in (560, 1120))
    assert done.warmup == 22.400000000000002
    said = told(done, longer)
    assert tells(said, "22.4 44.8 2240 4480") and "--train-iters" in said
    assert "000000" not in said
    said = told(schedule(lr=0.1), schedule(lr=0.1 + 1e-9))
    assert tells(said, "0.1 0.100000001") and "--train-iters" not in said


def test_what_a_style_does_not_look_at_may_change():
    config = LearningRateConfig(lr=1.0)
    longer = schedule(200, lr=1.0, lr_decay_style="constant", min_lr=0.5)
    saved = asdict(schedule(100, lr=1.0, lr_decay_style="constant"))
    assert schedule_in_force(longer, saved, config, what="x", samples=0) == longer
    with pytest.raises(ConfigError, match=r"(?s)400.*800"):
        schedule_in_force(schedule(200, lr=1.0), asdict(schedule(100, lr=1.0)), config, what="x", samples=0)


def test_the_rate_never_leaves_its_bounds_and_falls_after_the_warm_up():
    for style in ("linear", "cosine"):
        plan = schedule(lr=1.0, min_lr=0.1, lr_decay_style=style, lr_warmup_iters=10)
        rates = [plan.at(samples) for samples in range(0, 600)]
        assert rates[:41] == sorted(rates[:41])
        assert rates[40:] == sorted(rates[40:], reverse=True)
        assert max(rates) == 1.0
        assert rates[-1] == 0.1


def test_the_batch_size_changes_the_unit_only():
    config = LearningRateConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_iters=10)
    one, four = (learning_rate_schedule(config, RunLength(ITERS, "iters", batch)) for batch in (1, 4))
    assert [one.at(i) for i in range(150)] == pytest.approx([four.at(4 * i) for i in range(150)], rel=1e-12)


SETTINGS_AND_PROBLEMS = [
    ({"lr": 0.0}, "--lr 0.0"),
    ({"lr": -1.0}, "--lr -1.0|--min-lr 0.0 0 --lr -1.0"),
    ({"lr": 1e-3, "min_lr": -1e-3}, "--min-lr -0.001 0 --lr 0.001"),
    ({"lr": 1e-3, "min_lr": 1e-2}, "--min-lr 0.01 0 --lr 0.001"),
    ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "--lr-warmup-fraction --lr-warmup-iters"),
    ({"lr_warmup_fraction": -0.1}, "--lr-warmup-fraction -0.1 0 1"),
    ({"lr_warmup_iters": -1}, "--lr-warmup-iters -1"),
    ({"lr_decay_iters": 0}, "--lr-decay-iters 0 1"),
]


@pytest.mark.parametrize(("settings", "problems"), SETTINGS_AND_PROBLEMS)
def test_settings_that_cannot_work_are_explained(settings: dict, problems: str):
    with pytest.raises(ConfigError) as error:
        LearningRateConfig(**settings)
    assert tells_each(error.value.problems, problems)


SETTINGS_AND_DECAYS = [
    ({"lr_warmup_iters": 100}, 100, 100),
    ({"lr_warmup_iters": 50, "lr_decay_iters": 40}, 50, 40),
    ({"lr_warmup_fraction": 1.0, "lr_decay_style": "cosine"}, 100, 100),
]


@pytest.mark.parametrize(("settings", "warmup", "decay"), SETTINGS_AND_DECAYS)
def test_a_warm_up_must_end_before_the_decay(settings: dict, warmup: int, decay: int):
    with pytest.raises(ConfigError) as error:
        schedule(lr=1.0, **settings)
    given = "--lr-warmup-fraction" if "lr_warmup_fraction" in settings else "--lr-warmup-iters"
    assert tells(error.value, f"{warmup} {decay} {given} --lr-decay-iters")


def test_the_end_of_wsd_is_part_of_the_decay():
    with pytest.raises(ConfigError) as error:
        schedule(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=101)
    assert tells(error.value, "--lr-wsd-decay-iters 101 100 --lr-decay-iters")


def test_a_constant_rate_has_no_decay_to_outlast():
    assert schedule(lr=1.0, lr_decay_style="constant", lr_warmup_iters=200).at(400) == 0.5
