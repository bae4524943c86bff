"""The collector of Megatron's launch scripts sees what they start; with a clone: at least 98 % of those in scope are accepted.

MEGATRON_LM_PATH=CLONE python -m pytest tests/compat/test_launch_scripts.py -m sweep
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from launch_scripts import (
    TAGS,
    Command,
    Recorder,
    filled_in,
    measure,
    of_scripts,
    our_problems,
    words_of_value,
    write_recorders,
)

from megatron.porting.flags_in_launch_scripts import flags_of_shell

CLONE = os.environ.get("MEGATRON_LM_PATH")

LAUNCHER = """#!/bin/bash
set -e
CHECKPOINTS=<Specify path>
GPUS=4
rm -rf $CHECKPOINTS
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py --num-layers 2 --save $CHECKPOINTS --load $1
"""
SUBMITTED = """#!/bin/bash
MODEL="--num-layers 4"
srun --container-image x bash -c "cd /workspace; python -u /code/pretrain_bert.py $MODEL --split '949,50,1'"
python3 tools/other.py --num-layers 8
"""


@pytest.fixture
def tree() -> Iterator[Path]:
    """Two scripts of a release, where a user without rights may read them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        (Path(folder) / "tree").mkdir()
        (Path(folder) / "tree" / "a.sh").write_text(LAUNCHER)
        (Path(folder) / "tree" / "b.sh").write_text("sbatch --nodes=3 c.sh  # pretrain")
        (Path(folder) / "tree" / "c.sh").write_text(SUBMITTED)
        yield Path(folder) / "tree"


def test_a_script_starts_what_it_would_start_and_nothing_runs(tree: Path):
    write_recorders(tree.parent / "bin")
    found = list(of_scripts(tree, Recorder(tree, tree.parent / "bin")))
    gpt, from_sbatch, alone = found
    assert (gpt.source, gpt.program, gpt.ranks) == ("a.sh", "pretrain_gpt.py", 8)
    assert gpt.words == ["--num-layers", "2", "--save", "/data/given", "--load", "/data/argument1"]
    assert (from_sbatch.source, from_sbatch.program, from_sbatch.ranks) == ("b.sh", "pretrain_bert.py", 24)
    assert from_sbatch.words == ["--num-layers", "4", "--split", "949,50,1"] == alone.words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, []),
        ("", []),
        (False, ["false"]),
        (1e-5, ["1e-05"]),
        ("[attn mlp]", ["attn", "mlp"]),
        (["384 384 97656250"], ["384", "384", "97656250"]),
        ("0:384 200B:768", ["0:384 200B:768"]),
        ("([0]*2+[1]*3)", ["([0]*2+[1]*3)"]),
    ],
)
def test_a_value_becomes_the_words_that_the_runner_makes_of_it(value, words):
    assert words_of_value(value, is_quoted=True) == words


@pytest.mark.parametrize(
    "text",
    [
        "{model}-{size * 2}",
        "run.sh ${{ARGUMENTS[@]}}",
        "${{RUN:-{model}}} {{a}}",
        "{{{model}}}",
        'f() {{ echo "{size}"; }}',
    ],
)
def test_the_braces_of_a_recipe_are_those_of_a_python_f_string(text: str):
    model, size = "gpt", 3
    assert filled_in(text, {"model": model, "size": size}) == eval(f"f{text!r}")  # Python itself is the oracle


def test_our_parser_and_its_rules_judge_a_command():
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
    data = "--data-path a --vocab-file v --merge-file m --tensor-model-parallel-size 2 --deterministic-mode"
    assert not our_problems(Command("a.sh", "pretrain_gpt.py", [*words.split(), *data.split()], 8))
    (problem,) = our_problems(Command("a.sh", "pretrain_gpt.py", [*words.split(), *data.split()], 3))
    assert "world size 3" in problem
    experts = Command("a.sh", "pretrain_gpt.py", [*words.split(), *data.split(), "--num-experts=8"], 8)
    assert experts.asks_for() == ["experts"] and not our_problems(experts)  # counted apart, and built
    upcycled = Command("a.sh", "pretrain_gpt.py", [*experts.words, "--moe-use-upcycling"], 8)
    assert upcycled.asks_for() == ["experts"] and len(our_problems(upcycled)) == 1


@pytest.mark.sweep
@pytest.mark.skipif(CLONE is None or not Path(CLONE).is_dir(), reason="MEGATRON_LM_PATH names no clone of Megatron-LM")
def test_megatrons_own_scripts_are_accepted():
    measured = measure(CLONE, Path(tempfile.mkdtemp()))
    totals = measured.totals
    assert totals["scripts"] > 700
    assert totals["accepted"] >= 0.98 * totals["in scope"], measured.reasons.most_common(20)


def flags_passed(tree: Path) -> dict[tuple[str, str], set[str]]:
    """The flags that the scripts of a tree pass when they run, by script and program."""
    write_recorders(tree.parent / "bin")
    passed = defaultdict(set)
    for command in of_scripts(tree, Recorder(tree, tree.parent / "bin")):
        names = {word.split("=")[0] for word in command.words if re.match("--[A-Za-z]", word)}
        passed[command.source, command.program] |= names
    return passed


def test_the_text_of_a_script_gives_the_flags_that_it_passes(tree: Path):
    (tree / "b.sh").unlink()
    passed = flags_passed(tree)
    assert len(passed) == 2
    for (source, program), names in passed.items():
        found = flags_of_shell((tree / source).read_text(), source)[0]
        assert {use.flag for use in found if use.program == program} == names


@pytest.mark.sweep
@pytest.mark.skipif(CLONE is None or not Path(CLONE).is_dir(), reason="MEGATRON_LM_PATH names no clone of Megatron-LM")
@pytest.mark.parametrize("tag", TAGS[:-1])
def test_the_text_of_megatrons_own_scripts_gives_the_flags_that_they_pass(tag: str, tree: Path):
    tree = tree.parent / "release"
    tree.mkdir()
    archive = subprocess.run(["git", "-C", CLONE, "archive", tag, "examples"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    passed = flags_passed(tree)
    assert passed
    for (source, program), names in passed.items():
        found = flags_of_shell((tree / source).read_text(errors="replace"), source)[0]
        assert names <= {use.flag for use in found if use.program == program}, source
