"""No flag of Megatron's scripts ends as unknown: classic_flags.txt says what becomes of each, the real parser does it."""

import shlex
from pathlib import Path

import pytest

from megatron.core.base.dataclass_flags import ConfigError, flags_of, option_fields, unknown_flag_message
from megatron.training.arguments.command_line import make_parser, parse_args
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.ignored_and_refused_flags import (
    NO_EFFECT,
    OTHERS,
    REFUSED,
    SHORTHAND,
    SILENT,
    WARNED,
    OtherFlags,
    by_flag,
)

ROWS = [
    tuple(line.split(maxsplit=1))
    for line in (Path(__file__).parent / "classic_flags.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

PARSER = make_parser()


def lines_that(outcome: str) -> list[list[str]]:
    """The command lines with this outcome."""
    return [shlex.split(line) for what, line in ROWS if what == outcome]


def problems_of(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_args(words)
    return error.value.problems


def test_every_line_says_what_becomes_of_it():
    assert {outcome for outcome, _ in ROWS} <= {"works", "idle", "no-effect", "silent", "warned", "refused", "pending"}
    assert len(ROWS) == len(set(ROWS))


@pytest.mark.full
@pytest.mark.parametrize("words", lines_that("works"), ids=" ".join)
def test_a_flag_that_works_is_a_setting(words: list[str]):
    _, args, notes = parse_args(words)
    assert not any(note.startswith("no effect") for note in notes)
    flags = PARSER.actions_by_flag()
    fields = SHORTHAND.get(words[0]) or {flags[words[0]].dest: None}
    assert words[0] in ("--yaml-cfg", "--no-position-embedding") or all(name in args for name in fields)


@pytest.mark.parametrize("words", lines_that("idle"), ids=" ".join)
def test_a_setting_that_nothing_reads_is_listed_with_the_reason(words: list[str]):
    _, args, (note,) = parse_args(words)
    assert note.startswith(f"no effect here: {words[0]}: ") and PARSER.actions_by_flag()[words[0]].dest in args


def test_flags_without_effect_are_accepted_and_listed_once_with_the_reason():
    lines = lines_that("no-effect")
    config, args, notes = parse_args([word for line in lines for word in line])
    assert config == parse_args([])[0]
    listed = [word for note in notes for word in note.split(": ")[1].split()]
    assert sorted(listed) == sorted({line[0] for line in lines})
    assert all(len(note.split(": ", 2)[2]) > 10 for note in notes)
    assert not any(line[0] in args for line in lines)


def test_flags_that_go_with_one_that_is_not_given_are_accepted_in_silence():
    """Kernels of experts, and what Megatron itself does not read."""
    lines = lines_that("silent")
    config, args, notes = parse_args([word for line in lines for word in line])
    assert (config, notes) == (parse_args([])[0], [])
    assert not any(line[0] in args for line in lines)
    assert {flag for flag in OTHERS if flag.startswith("--moe-")} - {line[0] for line in lines} == {
        *("--moe-use-upcycling", "--moe-latent-size", "--moe-router-force-biased", "--moe-expert-rank-capacity-factor"),
        *("--moe-mlp-glu-interleave-size", "--moe-shared-expert-glu-interleave-size", "--moe-paged-stash"),
        *("--moe-routing-trace-path", "--moe-extended-tp"),
    }


@pytest.mark.parametrize("words", lines_that("warned"), ids=" ".join)
def test_a_flag_that_would_change_what_the_user_gets_is_warned_of_in_one_line(words: list[str]):
    config, args, notes = parse_args(words)
    assert config == parse_args([])[0]
    (note,) = notes
    warning, given, instead = note.split(": ", 2)
    assert (warning, given) == ("WARNING", " ".join(words))
    assert len(instead) > 10
    assert words[0] not in args


def test_refused_flags_say_why_and_what_to_do():
    lines = lines_that("refused")
    problems = problems_of([word for line in lines for word in line])
    for flag in (line[0] for line in lines):
        (problem,) = (p for p in problems if p.split()[0].rstrip(":") == flag)
        assert "unknown flag" not in problem
        assert "use" in problem or "leave it out" in problem or ";" in problem, f"{problem}: what should the user do?"
    assert len(problems) == len(lines)


@pytest.mark.parametrize("words", [line for line in lines_that("refused") if len(line) > 1], ids=" ".join)
def test_a_refused_value_is_refused_alone(words: list[str]):
    assert [problem.split()[0].rstrip(":") for problem in problems_of(words)] == [words[0]]


def test_flags_that_are_pending_are_unknown_still():
    """As soon as one works its line must say so."""
    known = PARSER.known_flags()
    done = [line[0] for line in lines_that("pending") if line[0] in known]
    assert not done, f"{', '.join(done)}: no longer pending; change the line in classic_flags.txt"


def test_the_list_holds_every_flag_without_effect_and_every_refused_one():
    listed = {line.split()[0] for _, line in ROWS}
    assert set(OTHERS) | set(SHORTHAND) <= listed


def test_a_flag_has_one_meaning():
    flags = [
        flag for component in COMPONENTS.values() for field in option_fields(component) for flag in flags_of(field)
    ]
    tables = (NO_EFFECT, SILENT, WARNED, REFUSED)
    assert not {*flags} & {*OTHERS}
    assert len(OTHERS) == sum(map(len, tables))


def test_no_flag_that_is_refused_is_suggested():
    """Nor one that is farther from what was meant than the refused one is."""
    refused = list(REFUSED)
    underscored = {f"--{flag[2:].replace('-', '_')}" for flag in refused}
    slips = [*underscored, *(f"{flag}x" for flag in refused[::8]), *(flag[:-1] for flag in refused[::8])]
    for problem in problems_of([slip for slip in slips if slip not in PARSER.known_flags()]):
        suggested = problem.partition("; did you mean ")[2].rstrip("?").split(" or ")
        assert not {*suggested} & {*REFUSED}, problem


ABBREVIATED = [
    ("--tp", "--tensor-model-parallel-size"),
    ("--tp-size", "--tensor-model-parallel-size"),
    ("--pp=2", "--pipeline-model-parallel-size"),
    ("--vpp", "--num-virtual-stages-per-pipeline-rank"),
    ("--cp", "--context-parallel-size"),
    ("-cp", "--context-parallel-size"),
    ("--ep", "--expert-model-parallel-size"),
    ("--ep_size", "--expert-model-parallel-size"),
    ("--etp", "--expert-tensor-parallel-size"),
    ("--sp", "--sequence-parallel"),
    ("--mbs", "--micro-batch-size"),
    ("--gbs", "--global-batch-size"),
    ("--gqa", "--group-query-attention"),
    ("--wd", "--weight-decay"),
    ("--lr-warmup", "--lr-warmup-iters"),
    ("--warmup-steps", "--lr-warmup-iters"),
    ("--warmup_ratio", "--lr-warmup-fraction"),
]


@pytest.mark.parametrize(("short", "flag"), ABBREVIATED)
def test_the_fields_abbreviation_suggests_the_flag_it_stands_for(short: str, flag: str):
    assert short not in PARSER.known_flags()
    assert flag in PARSER.known_flags()
    assert unknown_flag_message(short, PARSER.known_flags(), PARSER.refused) == (
        f"unknown flag {short}; did you mean {flag}?"
    )
    # a tool that has no such flag suggests none
    assert flag not in unknown_flag_message(short, ["--load", "--cp-comm-type"])


def test_an_abbreviation_without_a_flag_of_its_own_suggests_none():
    assert "did you mean" not in unknown_flag_message("--dp", PARSER.known_flags(), PARSER.refused)


def test_a_table_has_rows_of_flags_that_share_a_reason():
    flags = by_flag(
        OtherFlags(
            "why",
            switches=("--a",),
            values={"--b": "N", "--d": "N"},
            lists={"--c": "NAME"},
            harmless={"--d": ("0", "1")},
        ),
        OtherFlags("whence", switches=("--e",)),
    )
    assert {(f.flag, f.values, f.metavar, f.harmless, f.reason) for f in flags.values()} == {
        ("--a", "0", "", (), "why"),
        ("--b", "1", "N", (), "why"),
        ("--c", "*", "NAME", (), "why"),
        ("--d", "1", "N", ("0", "1"), "why"),
        ("--e", "0", "", (), "whence"),
    }
    harmless = {text: flags["--d"].is_harmless(text) for text in ("0", "1", "1.0", "10", "2", "none")}
    assert harmless == {"0": True, "1": True, "1.0": True, "10": False, "2": False, "none": False}
    assert not flags["--a"].is_harmless(True)
