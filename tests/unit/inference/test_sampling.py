"""Choosing a token: closed forms for every step of the draw, and every message."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from said import raises_telling

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.inference.top_k_top_p_sampling import (
    SamplingConfig,
    chooser,
    distribution,
    greedy,
    keep_top_k,
    keep_top_p,
    sample,
)

ROOT = Path(__file__).resolve().parents[3]
PROBABILITIES = (0.05, 0.5, 0.15, 0.3)
SCORES = torch.tensor(PROBABILITIES, dtype=torch.float64).log() + 7.0  # a constant added changes nothing
ALL = SamplingConfig()


def kept(scores):
    """The ids that can still be drawn."""
    return scores.isfinite().nonzero().flatten().tolist()


def close(got, expected):
    return torch.allclose(got, torch.tensor(expected, dtype=got.dtype), rtol=0, atol=1e-12)  # float64: a few roundings


def draws(config, count, seed=3, scores=SCORES):
    generator = torch.Generator().manual_seed(seed)
    return [sample(scores, config, generator) for _ in range(count)]


# ---------------------------------------------------------------- each step


def test_nothing_asked_for_is_the_softmax():
    assert close(distribution(SCORES, ALL), PROBABILITIES)
    assert distribution(SCORES.float(), ALL).dtype == torch.float64


def test_top_k_keeps_k():
    for k in range(1, 7):
        assert len(kept(keep_top_k(SCORES, k))) == min(k, 4)
    assert kept(keep_top_k(SCORES, 2)) == [1, 3]
    assert kept(keep_top_k(torch.zeros(9), 4)) == [0, 1, 2, 3], "of equals the smaller ids"


@pytest.mark.parametrize(
    ("p", "ids"),
    [
        (1e-9, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),  # sums of the falling probabilities: 0.5  0.8  0.95  1
        (0.79, [1, 3]),
        (0.81, [1, 2, 3]),
        (0.96, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, ids):
    assert kept(keep_top_p(SCORES, p)) == ids


def test_top_p_is_the_smallest_set_on_random_scores():
    generator = torch.Generator().manual_seed(0)
    for p in (0.1, 0.5, 0.9, 0.99):
        scores = 3 * torch.randn(200, generator=generator, dtype=torch.float64)
        is_kept = keep_top_p(scores, p).isfinite()
        inside, outside = scores.softmax(0)[is_kept], scores.softmax(0)[~is_kept]
        assert inside.sum() >= p
        assert inside.sum() - inside.min() < p, "without its least likely it falls short"
        assert inside.min() >= outside.max(), "nothing likelier is left out"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 3.0])
def test_temperature_is_a_power_of_the_probabilities(temperature):
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    assert close(distribution(SCORES, SamplingConfig(temperature=temperature)), [p / sum(powers) for p in powers])


def test_temperature_limits_are_greedy_and_uniform():
    for cold in (1e-3, 1e-300, 5e-324):
        assert close(distribution(SCORES, SamplingConfig(temperature=cold)), (0, 1, 0, 0))
    assert close(distribution(SCORES, SamplingConfig(temperature=1e300)), (0.25,) * 4)


def test_the_order_is_temperature_then_top_k_then_top_p():
    # top-k 2 leaves 0.5 and 0.3, that is 0.625 and 0.375: p = 0.6 then keeps one; before top-k it would keep two
    assert close(distribution(SCORES, SamplingConfig(top_k=2, top_p=0.6)), (0, 1, 0, 0))
    assert close(distribution(SCORES, SamplingConfig(top_p=0.6)), (0, 0.625, 0, 0.375))
    # at temperature 0.5 the likeliest has 0.25 / 0.365 = 0.68: p = 0.6 keeps it alone
    assert close(distribution(SCORES, SamplingConfig(temperature=0.5, top_p=0.6)), (0, 1, 0, 0))


# ---------------------------------------------------------------- the choice


def test_greedy_is_argmax_and_of_equals_the_smallest():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        scores = torch.randn(50, generator=generator)
        assert greedy(scores) == int(scores.argmax()) == sample(scores, SamplingConfig(top_k=1), generator)
    assert greedy(torch.tensor([1.0, 3.0, 3.0, -math.inf])) == 1
    assert chooser(SamplingConfig(greedy=True), generator)(SCORES) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "config", [ALL, SamplingConfig(temperature=2.0, top_k=3), SamplingConfig(top_p=0.6)], ids=("all", "top-k", "top-p")
)
def test_histogram_of_draws_is_the_distribution(config):
    # A share of n draws has standard deviation sqrt(p (1 - p) / n), at most 0.5 / sqrt(n); five of them are exceeded
    # once in two million times, and the seed is fixed.
    n, expected = 4000, distribution(SCORES, config)
    shares = torch.bincount(torch.tensor(draws(config, n)), minlength=4).double() / n
    assert (shares - expected).abs().max() < 5 * 0.5 / math.sqrt(n)
    assert not shares[expected == 0].any(), "what is cut off is never drawn"


def test_same_seed_same_draws():
    choices = [chooser(replace(ALL, temperature=1.5), torch.Generator().manual_seed(5)) for _ in range(2)]
    assert [choices[0](SCORES) for _ in range(50)] == [choices[1](SCORES) for _ in range(50)]
    assert draws(ALL, 50, seed=1) != draws(ALL, 50, seed=2)


def test_scores_are_left_as_they_were():
    before = SCORES.clone()
    draws(SamplingConfig(temperature=0.5, top_k=2, top_p=0.5), 2)
    assert torch.equal(SCORES, before)


# ---------------------------------------------------------------- messages


SETTINGS_AND_MESSAGES = [
    ({"temperature": 0.0}, "--temperature is 0.0"),
    ({"temperature": -1.0}, "--temperature is -1.0"),
    ({"temperature": math.inf}, "--temperature inf"),
    ({"temperature": math.nan}, "--temperature nan"),
    ({"top_k": 0}, "--top-k 0 1"),
    ({"top_p": 0.0}, "--top-p is 0.0"),
    ({"top_p": 1.1}, "--top-p is 1.1"),
    ({"top_p": math.nan}, "--top-p nan"),
    ({"greedy": True, "top_k": 3}, "--greedy --temperature --top-k --top-p"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS_AND_MESSAGES)
def test_settings_that_cannot_work(settings, message):
    with raises_telling(ConfigError, message):
        SamplingConfig(**settings)


def test_all_problems_are_said_at_once():
    with pytest.raises(ConfigError) as error:
        SamplingConfig(temperature=0.0, top_k=0, top_p=2.0)
    assert len(error.value.problems) == 3


SCORES_AND_MESSAGES = [
    (torch.tensor([0.0, math.nan]), "2 nan"),
    (torch.tensor([0.0, math.inf]), "2 inf"),
    (torch.tensor([-math.inf, -math.inf]), "2 -inf"),
    (torch.zeros(2, 3), "2 3"),
    (torch.zeros(0), "0"),
]


@pytest.mark.parametrize(("scores", "message"), SCORES_AND_MESSAGES)
def test_scores_that_no_token_can_be_chosen_by(scores, message):
    for choose in (greedy, lambda scores: distribution(scores, ALL)):
        with raises_telling(ValueError, message):
            choose(scores)


@pytest.mark.full
def test_package_loads_its_parts_when_asked():
    code = "import sys, megatron.core.inference; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
    import megatron.core.inference as inference

    assert all(getattr(inference, name) for name in dir(inference))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        inference.nonsense  # noqa: B018
