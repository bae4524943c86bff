"""Every command answers --help and --version at once, without torch, and `python -m megatron` lists them all."""

import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from said import tells

from megatron.__main__ import commands, main
from megatron.core.base.version import version_text
from megatron.training.arguments.parser import make_parser
from tools import prepare_cache
from tools.script import script_at

COMMANDS = {command.name: command.path for command in commands()}
# Runs each program with a word in this one process, as `python FILE WORD` does, and tells what it prints.
ASK = """
import contextlib, io, json, os, runpy, sys, time
os.environ["COLUMNS"] = "100"
answers = {}
word, *paths = sys.argv[1:]
for path in paths:
    sys.argv = [path, word]
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as ended:
            status = ended.code
    answers[path] = (status or 0, said.getvalue(), time.process_time() - began, "torch" in sys.modules)
json.dump(answers, sys.stdout)
"""


def ask(word: str, paths: list[Path]) -> dict[str, list]:
    """What each program answers to a word: its status, its text, its seconds of processor time, and whether torch is imported."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", ASK, word, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_every_command_answers_help_without_torch():
    answers = ask("--help", list(COMMANDS.values()))
    assert len(answers) == len(COMMANDS) > 20
    for path, (status, text, seconds, has_torch) in answers.items():
        assert status == 0 and "usage:" in text and "--version" in text, path
        assert not has_torch and seconds < 1, (path, seconds)


def test_every_command_says_the_version():
    for path, (status, text, _, has_torch) in ask("--version", list(COMMANDS.values())).items():
        assert (status, text, has_torch) == (0, version_text() + "\n", False), path


@pytest.mark.parametrize("name", ["pretrain-gpt", "pretrain-bert", "pretrain-t5", "prepare-cache"])
def test_the_help_is_that_of_the_parser_of_a_run(name: str, monkeypatch):
    """`pretrain` has further defaults of its own, which the script's early answer must know."""
    path = COMMANDS[name]
    monkeypatch.setenv("COLUMNS", "100")
    if name == "prepare-cache":
        defaults = prepare_cache.defaults_of(prepare_cache.SCRIPTS["gpt"])
        parser = make_parser(prepare_cache.add_flags, defaults, prepare_cache.UNREAD)
    else:
        script = script_at(str(path))
        parser = make_parser(script.extra_args_provider, script.args_defaults)
    parser.prog = path.name
    assert ask("--help", [path])[str(path)][1] == parser.format_help()


def test_a_script_may_have_a_version_flag_of_its_own(capsys):
    parser = make_parser(lambda parser: parser.add_argument("--version", type=int))
    assert parser.parse_known_args(["--version", "3"])[0].version == 3
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_known_args(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == version_text() + "\n"


def test_the_commands_are_listed_and_run(capsys, monkeypatch):
    assert main([]) == 0
    said = capsys.readouterr().out
    for name, path in COMMANDS.items():
        assert f"\n  {name} " in said and path.is_file()
    assert main(["--version"]) == 0 and capsys.readouterr().out == version_text() + "\n"
    assert main(["examples"]) == 0
    assert Path(capsys.readouterr().out.strip(), "recipes", "tiny.yaml").is_file()
    assert main(["plot-schedules"]) == 2
    assert tells(capsys.readouterr().err, "plot-schedules none of plot-schedule")
    ran = []
    monkeypatch.setattr("os.execv", lambda _, words: ran.append(words[1:]))
    main(["megatron-plot-schedule", "--all"])
    main(["plot_run", "--log", "x"])
    main(["report"])
    assert ran[0] == [str(ROOT / "tools/plot_schedule.py"), "--all"]
    assert ran[1] == [str(ROOT / "tools/plot_run.py"), "--log", "x"]
    assert ran[2][:2] == ["-m", "megatron.report"]
