"""--help begins with what every run needs and shows the flags that work; --help-all shows the others too."""

import re

import pytest

from megatron.core.base.dataclass_flags import ConfigError, flags_of, option_fields
from megatron.core.datasets.choose_masked_spans import MaskedDataConfig
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.config import COMPONENTS
from megatron.training.arguments.ignored_and_refused_flags import NO_EFFECT, REFUSED
from megatron.training.initialize import collect_config_problems

NEEDED = [
    *("--micro-batch-size", "--seq-length", "--lr", "--train-iters", "--train-samples"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size"),
    *("--data-path", "--mock-data"),
]
MASKED = {flags_of(field)[0] for field in option_fields(MaskedDataConfig)}


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def show(flag: str = "--help", **script) -> str:
        with pytest.raises(SystemExit) as ended:
            parse_args([flag], **script)
        assert ended.value.code == 0
        return capsys.readouterr().out

    return show


def listed(text: str) -> list[str]:
    """The flags that have a line of their own, in order."""
    return ["".join(found) for found in re.findall(r"^  (--[\w-]+)(?: [A-Z{]|  |,|$)|^    (--[\w-]+)$", text, re.M)]


GPT = {"args_defaults": {"tokenizer_type": "GPT2BPETokenizer"}, "unread": GPT_RULES.unread}
BERT = {"args_defaults": {"tokenizer_type": "BertWordPieceLowerCase"}, "unread": BERT_RULES.unread}


@pytest.mark.parametrize("script", [GPT, BERT], ids=["GPT", "BERT"])
def test_help_begins_with_what_every_run_needs(shown, script: dict):
    text = shown(**script)
    assert listed(text)[: len(NEEDED)] == NEEDED
    assert f"(default: {script['args_defaults']['tokenizer_type']})" in " ".join(text.split())
    assert MASKED.isdisjoint(listed(text)) == (script is GPT), "which a GPT does not look at"
    working = {flags_of(f)[0] for part in COMPONENTS.values() for f in option_fields(part)} - (
        MASKED if script is GPT else set()
    )
    assert working <= set(listed(text))


def test_flags_that_do_nothing_here_are_shown_by_help_all_alone(shown):
    short, full = shown(**GPT), shown("--help-all", **GPT)
    others = {*NO_EFFECT, *REFUSED}
    assert others.isdisjoint(listed(short)) and "--help-all" in short
    assert others | MASKED | set(listed(short)) <= set(listed(full))
    assert listed(full)[: len(NEEDED)] == NEEDED
    for reason in (NO_EFFECT["--manual-gc"].reason, REFUSED["--spec"].reason):
        assert reason in full


def own(parser):
    parser.add_argument("--my-switch", action="store_true", help="a switch of mine")
    parser.add_argument_group("mine").add_argument("--my-rate", type=float, help="a rate of mine")
    parser.add_argument("--temperature", type=float, help="a meaning of mine")


def test_the_flags_of_a_script_come_next(shown):
    flags = listed(shown(extra_args_provider=own, **GPT))
    assert flags[len(NEEDED) :][:3] == ["--my-switch", "--temperature", "--my-rate"]
    assert len(flags) == len(set(flags))


def test_the_example_of_help_is_a_run(shown):
    text = shown(**GPT)
    (words,) = re.findall(r"try things out:\n(.*?)\n\n", text, re.S)
    for rules in (GPT_RULES, BERT_RULES):
        config, _, notes = parse_args(words.split(), unread=rules.unread)
        problems = collect_config_problems(config, 1, rules).problems
        assert (problems, notes) == ([], [])
    with pytest.raises(ConfigError):
        parse_args([*words.split(), "--help-al"])
