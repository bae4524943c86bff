"""The learning rate against the closed forms of Megatron's schedule, counted in samples."""

import math

import pytest

from megatron.core.config import ConfigError
from megatron.core.optimizer.lr_schedule import LearningRateConfig, LearningRateSchedule

BATCH, ITERS = 4, 100  # 400 samples


def schedule(train_iters: int = ITERS, **settings) -> LearningRateSchedule:
    return LearningRateSchedule(LearningRateConfig(**settings), train_iters, BATCH)


# settings, then {samples: rate}
TABLE = [
    ({"lr": 1.0, "lr_decay_style": "constant"}, {0: 1, 1: 1, 400: 1, 401: 1, 10_000: 1}),
    ({"lr": 1.0, "lr_decay_style": "constant", "lr_warmup_iters": 10}, {0: 0, 4: 0.1, 20: 0.5, 40: 1, 41: 1, 900: 1}),
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
]  # fmt: skip


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
    one, four = LearningRateSchedule(config, ITERS, 1), LearningRateSchedule(config, ITERS, 4)
    assert [one.at(i) for i in range(150)] == pytest.approx([four.at(4 * i) for i in range(150)], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"lr": 0.0}, ["--lr is 0.0; it must be positive"]),
        (
            {"lr": -1.0},
            ["--lr is -1.0; it must be positive", "--min-lr is 0.0; it must be between 0 and --lr (-1.0)"],
        ),
        ({"lr": 1e-3, "min_lr": -1e-3}, ["--min-lr is -0.001; it must be between 0 and --lr (0.001)"]),
        ({"lr": 1e-3, "min_lr": 1e-2}, ["--min-lr is 0.01; it must be between 0 and --lr (0.001)"]),
        (
            {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3},
            ["--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one"],
        ),
        ({"lr_warmup_fraction": -0.1}, ["--lr-warmup-fraction is -0.1; it must be in [0, 1]"]),
        ({"lr_warmup_iters": -1}, ["--lr-warmup-iters is -1; it must not be negative"]),
        ({"lr_decay_iters": 0}, ["--lr-decay-iters is 0; it must be at least 1"]),
    ],
)
def test_settings_that_cannot_work_are_explained(settings: dict, problems: list[str]):
    with pytest.raises(ConfigError) as error:
        LearningRateConfig(**settings)
    assert error.value.problems == problems


@pytest.mark.parametrize(
    ("settings", "warmup", "decay"),
    [
        ({"lr_warmup_iters": 100}, 100, 100),
        ({"lr_warmup_iters": 50, "lr_decay_iters": 40}, 50, 40),
        ({"lr_warmup_fraction": 1.0, "lr_decay_style": "cosine"}, 100, 100),
    ],
)
def test_a_warm_up_must_end_before_the_decay(settings: dict, warmup: int, decay: int):
    with pytest.raises(ConfigError) as error:
        schedule(lr=1.0, **settings)
    given = "--lr-warmup-fraction" if "lr_warmup_fraction" in settings else "--lr-warmup-iters"
    assert str(error.value) == (
        f"the warm-up ({warmup} iterations) must end before the decay does ({decay}); lower {given} or raise --lr-decay-iters"
    )


def test_a_constant_rate_has_no_decay_to_outlast():
    assert schedule(lr=1.0, lr_decay_style="constant", lr_warmup_iters=200).at(400) == 0.5
