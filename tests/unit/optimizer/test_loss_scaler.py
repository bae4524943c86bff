"""The loss scale step by step, as tables; the learning rates and the groups that go with it; their messages."""

import json
import math

import pytest
from said import tells

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.optimizer.loss_scaler import ConstantGradScaler, DynamicGradScaler, LossScaleConfig, make_grad_scaler
from megatron.core.optimizer.lr_wd_schedule_by_samples import LearningRateConfig, RunLength, learning_rate_schedule
from megatron.core.optimizer.param_groups import ParamGroup, default_group
from megatron.core.sharding.placement import Placement

GOOD, BAD = False, True

# window 4, hysteresis 2, minimum 1, from 16: (step, scale after it, good steps in a row, patience)
STEPS = [
    (BAD, 16.0, 0, 1),  # borne
    (GOOD, 16.0, 1, 1),  # a good step restores no patience ...
    (BAD, 8.0, 0, 0),  # ... so the next overflow halves
    (BAD, 4.0, 0, -1),  # and so does every further one
    (GOOD, 4.0, 1, -1),
    (GOOD, 4.0, 2, -1),
    (GOOD, 4.0, 3, -1),
    (GOOD, 8.0, 0, 2),  # the window is full: growth, and patience
    (GOOD, 8.0, 1, 2),
    (BAD, 8.0, 0, 1),  # borne; the window begins anew
    (GOOD, 8.0, 1, 1),
    (GOOD, 8.0, 2, 1),
    (GOOD, 8.0, 3, 1),
    (GOOD, 16.0, 0, 2),
    (GOOD, 16.0, 1, 2),
    (GOOD, 16.0, 2, 2),
    (GOOD, 16.0, 3, 2),
    (GOOD, 32.0, 0, 2),
    (BAD, 32.0, 0, 1),
    (BAD, 16.0, 0, 0),
    (BAD, 8.0, 0, -1),
    (BAD, 4.0, 0, -2),
    (BAD, 2.0, 0, -3),
    (BAD, 1.0, 0, -4),
    (BAD, 1.0, 0, -5),  # the minimum
]


def scaler() -> DynamicGradScaler:
    return DynamicGradScaler(16.0, minimum=1.0, window=4, hysteresis=2)


def test_the_scale_follows_the_table():
    it = scaler()
    for number, (overflow, *expected) in enumerate(STEPS):
        it.update(overflow)
        assert [it.scale, it.good_steps, it.patience] == expected, f"after step {number}"


@pytest.mark.parametrize("stop", range(len(STEPS)))
def test_a_resumed_scaler_goes_on_by_the_table(stop: int):
    before, after = scaler(), DynamicGradScaler(2.0**32, minimum=1.0, window=4, hysteresis=2)
    for overflow, *_ in STEPS[:stop]:
        before.update(overflow)
    after.load_state(json.loads(json.dumps(before.state())))
    for overflow, *expected in STEPS[stop:]:
        after.update(overflow)
        assert [after.scale, after.good_steps, after.patience] == expected


def test_one_overflow_halves_at_hysteresis_one():
    it = DynamicGradScaler(16.0, minimum=1.0, window=2, hysteresis=1)
    scales = []
    for overflow in (BAD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD):
        it.update(overflow)
        scales.append(it.scale)
    assert scales == [8.0, 8.0, 4.0, 4.0, 8.0, 8.0, 16.0]


def test_defaults_are_megatrons():
    it = make_grad_scaler(LossScaleConfig(), fp16=True)
    assert isinstance(it, DynamicGradScaler)
    assert (it.scale, it.minimum, it.window, it.hysteresis) == (2.0**32, 1.0, 1000, 2)
    for _ in range(999):
        it.update(GOOD)
    assert it.scale == 2.0**32
    it.update(GOOD)
    assert it.scale == 2.0**33


def test_a_given_scale_stays():
    it = make_grad_scaler(LossScaleConfig(loss_scale=128.0), fp16=True)
    assert isinstance(it, ConstantGradScaler)
    for overflow in (BAD, BAD, BAD, GOOD):
        it.update(overflow)
    it.load_state({"scale": 2.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert it.scale == 128.0
    assert it.state() == {}


def test_what_is_scaled():
    assert make_grad_scaler(LossScaleConfig(), fp16=False) is None
    assert make_grad_scaler(LossScaleConfig(loss_scale=8.0), fp16=False).scale == 8.0
    assert make_grad_scaler(LossScaleConfig(loss_scale=0.0), fp16=True).can_fall, "0 is Megatron's spelling of unset"


def test_a_state_without_a_scale_changes_nothing():
    it = scaler()
    it.load_state({})
    assert it.state() == scaler().state()


SETTINGS_AND_MESSAGES = [
    ({"loss_scale": -1.0}, "--loss-scale is -1.0"),
    ({"min_loss_scale": 0.0}, "--min-loss-scale is 0.0"),
    ({"initial_loss_scale": 0.5}, "--min-loss-scale 1.0 --initial-loss-scale 0.5"),
    ({"loss_scale_window": 0}, "--loss-scale-window 0 1"),
    ({"hysteresis": 0}, "--hysteresis 0 1"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS_AND_MESSAGES)
def test_impossible_scales_are_refused(settings: dict, message: str):
    with pytest.raises(ConfigError) as error:
        LossScaleConfig(**settings)
    assert tells(error.value, message)


# ---------------------------------------------------------------- learning rates of their own


def test_decoupled_rate_follows_the_same_curve_between_its_own_ends():
    config = LearningRateConfig(
        lr=1.0, min_lr=0.1, decoupled_lr=0.5, decoupled_min_lr=0.02, lr_decay_style="cosine", lr_warmup_iters=10
    )
    schedule = learning_rate_schedule(config, RunLength(110, "iters", 4))
    for samples in (0, 12, 40, 41, 100, 240, 439, 440, 1000):
        if samples <= 40:
            expected = 1.0 * samples / 40, 0.5 * samples / 40
        else:
            share = 0.5 * (math.cos(math.pi * min((samples - 40) / 400, 1.0)) + 1.0)
            expected = 0.1 + share * 0.9, 0.02 + share * 0.48
        assert (schedule.at(samples), schedule.decoupled_at(samples)) == pytest.approx(expected, rel=1e-12)


def test_decoupled_rate_is_off_by_default_and_ends_at_min_lr():
    plain = learning_rate_schedule(LearningRateConfig(lr=1.0), RunLength(10))
    assert plain.decoupled_at(3) is None
    floored = learning_rate_schedule(LearningRateConfig(lr=1.0, min_lr=0.25, decoupled_lr=0.5), RunLength(10))
    assert floored.decoupled_at(11) == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoupled_min_lr": 0.1}, "--decoupled-min-lr needs --decoupled-lr"),
        ({"decoupled_lr": 0.0}, "--decoupled-lr 0.0"),
        ({"decoupled_lr": 0.1, "min_lr": 0.5}, "--min-lr 0.5 0 --decoupled-lr 0.1"),
    ],
)
def test_impossible_decoupled_rates_are_refused(settings: dict, message: str):
    with pytest.raises(ConfigError) as error:
        LearningRateConfig(lr=1.0, **settings)
    assert tells(error.value, message)


def test_default_groups():
    matrix, vector = Placement((4, 4), init=None), Placement((4,), init=None)
    assert default_group("decoder.layers.0.mlp.linear_fc1.weight", matrix) == ParamGroup()
    assert default_group("decoder.layers.0.mlp.linear_fc1.bias", vector) == ParamGroup(weight_decay_multiplier=0.0)
    assert default_group("embedding.word_embeddings.weight", matrix) == ParamGroup(decoupled=True)
    assert default_group("output_layer.weight", matrix) == ParamGroup(decoupled=True)
    assert default_group("embedding.position_embeddings.weight", matrix) == ParamGroup()
