"""Flags that a script adds: read beside ours, shown at the start, kept in the checkpoint as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from said import tells, tells_each

from megatron.core.base.dataclass_flags import ConfigError, add_flags, build, option
from megatron.training.arguments.command_line import parse_args


def problems_of(line: str, extra_args_provider="extra") -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_args(line.split(), extra if extra_args_provider == "extra" else extra_args_provider)
    return error.value.problems


def extra(parser):
    group = parser.add_argument_group("mine")
    group.add_argument("--my-rate", type=float, default=0.25, help="a rate in %%")
    group.add_argument("--my-name", default=None)
    group.add_argument("--my-switch", action="store_true")
    return parser


def test_a_script_brings_flags_of_its_own():
    config, args, _ = parse_args(["--my-rate", "0.5", "--num-layers", "2"], extra_args_provider=extra)
    assert (args.my_rate, args.my_name, args.my_switch) == (0.5, None, False)
    assert config.transformer.num_layers == args.num_layers == 2
    assert tells_each(problems_of("--my-ratte 1"), "--my-ratte --my-rate")
    assert problems_of("--my-rate x") == ["--my-rate: invalid float value: 'x'"]


def test_a_script_may_mean_something_of_its_own_by_a_flag_that_is_refused_or_without_effect():
    def own(parser):
        parser.add_argument("--temperature", type=float, default=1.0)
        parser.add_argument("--num-classes", type=int, default=2)

    _, args, notes = parse_args(["--temperature", "0.5", "--num-classes", "3"], extra_args_provider=own)
    assert (args.temperature, args.num_classes, notes) == (0.5, 3, [])
    assert tells(problems_of("--temperature 0.5", None)[0], "--temperature")


def test_a_provider_may_return_nothing():
    _, args, _ = parse_args(["--my-switch"], extra_args_provider=lambda parser: extra(parser) and None)
    assert args.my_switch is True


def test_defaults_of_the_script_fill_in_its_own_flags_where_they_are_none():
    _, args, _ = parse_args([], extra_args_provider=extra, args_defaults={"my_name": "x"})
    assert args.my_name == "x"


@dataclass(frozen=True)
class Wings:
    """Wings."""

    wings: int = option(2, "how many", of_model=True)
    feathers: list[str] = option(["down"], "of what kind")


def test_options_that_are_not_given_are_in_args_with_their_defaults():
    """As those of `add_argument` are: a script builds its config from them in every call."""

    def own(parser):
        add_flags(parser, Wings)

    for words, defaults, expected in (
        ([], {}, Wings()),
        (["--feathers", "quill"], {}, Wings(feathers=["quill"])),
        ([], {"wings": 6}, Wings(wings=6)),
        (["--wings=8"], {"wings": 6}, Wings(wings=8)),
    ):
        args = parse_args(words, own, defaults).args
        assert build(Wings, vars(args)) == expected
        assert (args.wings, args.feathers) == (expected.wings, expected.feathers)
    assert parse_args([], own).args.feathers is not parse_args([], own).args.feathers, "a list of its own"


def winged(parser):
    add_flags(parser, Wings)
    extra(parser)
    parser.add_argument("--table", type=Path, default="a/b")
    parser.add_argument("--kind", type=lambda text: {"as": text}, default="x")
    parser.add_argument("--my-lr", dest="lr", type=float)  # another spelling of ours


def test_a_scripts_flags_are_shown_with_their_defaults_and_kept_as_json():
    config, args, _ = parse_args(["--wings=4", "--my-rate=0.5", "--my-lr=2", "--table=c"], winged, {"my_name": "x"})
    expected = dict(feathers=["down"], my_rate=0.5, my_name="x", my_switch=False, table="c", kind={"as": "x"})
    saved = json.loads(json.dumps(config.as_json()))
    assert (saved["own"], saved["own_model"]) == (expected, {"wings": 4})
    assert config.learning_rate.lr == 2 and args.table == Path("c"), "scripts see the values themselves"
    assert config.changed_lines()[-10:] == [
        "  Wings",
        "    wings      4  (default 2)",
        "    feathers   down",
        "  mine",
        "    my_rate    0.5  (default 0.25)",
        "    my_name    x",
        "    my_switch  False",
        "  Flags of this script",
        "    table      c  (default a/b)",
        "    kind       {'as': 'x'}",
    ]
    assert {flag.name: flag.default for flag in config.own.flags}["table"] == "a/b"


def test_without_flags_of_its_own_there_is_nothing_to_show():
    config, _, _ = parse_args([])
    assert config.changed_lines() == [] and config.as_json()["own"] == config.as_json()["own_model"] == {}
