"""Draws the two pictures of docs/architecture.md from the code: the floors, and a batch's way through them.

python tests/architecture_doc.py

The floors are the rows of tests/test_architecture.py, with the lines of code of each package. The way is recorded: one training step of
the first and one of the last rank of a pipeline of two, ranks as threads; each file stands where a function of it is entered first,
below its caller's.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from code_lines import code_lines
from local_ranks import run_ranks
from script_run import trainer_of
from test_architecture import ROWS

import pretrain_gpt
from megatron.core.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 116
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --lr 1e-3 --mock-data --eval-iters 0 --num-workers 0 --device cpu "
    "--tokenizer-type NullTokenizer --vocab-size 30"
)
# What a step asks beside its way, and what only looks at it.
BESIDE = (
    "training/settings",
    "training/watch",
    "training/ending",
    "training/memory",
    "core/config.py",
    "core/device.py",
)


def floors() -> str:
    """A line or more for each floor, from the top: its packages with their lines of code."""
    upper = [("tools", "pretrain_*.py", "examples", "tests"), ("megatron/training",)]
    rows = [*upper, *([f"megatron/core/{name}" for name in sorted(row)] for row in reversed(ROWS))]
    lines = []
    for number, row in zip(range(len(rows) - 1, -1, -1), rows):
        boxes = [_box(name) for name in row]
        head = f"{number}  "
        for box in boxes:
            if len(head) + len(box) > WIDTH:
                lines, head = [*lines, head.rstrip()], "   "
            head += f"{box} "
        lines.append(head.rstrip())
    return "\n".join(lines)


def _box(name: str) -> str:
    """[transformer 640], and of a file that imports nothing of the house the same."""
    path = ROOT / name
    files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else sorted(path.rglob("*.py"))
    short = name.removeprefix("megatron/core/").removeprefix("megatron/")
    lines = sum(len(code_lines(file.read_text())) for file in files)
    return f"[{short} {lines:,}]" if name.startswith(("megatron", "tools")) else f"[{short}]"


def ways() -> list[str]:
    """Of each of two pipeline ranks: the files of one step, in the order in which they are entered, each below its caller's."""
    steps: list[list[tuple[int, str, str]]] = [[], []]

    def work(mesh: Mesh) -> None:
        mine = steps[mesh["pp"].rank]
        with trainer_of(pretrain_gpt, mesh, FLAGS) as run:
            sys.setprofile(lambda frame, event, _: note(frame, mine) if event == "call" else None)
            try:
                run._train()
            finally:
                sys.setprofile(None)

    def note(frame: Any, mine: list[tuple[int, str, str]]) -> None:
        name = _name_of(frame)
        lines = {line for _, _, line in frame.f_code.co_lines()}
        if name is None or len(lines) < 4 or any(name == known for _, _, known in mine):
            return  # a question of one line is no station
        depth_of, caller = {known: depth for depth, _, known in mine}, frame.f_back
        while caller is not None and _name_of(caller) not in depth_of:
            caller = caller.f_back
        depth = 0 if caller is None else depth_of[_name_of(caller)] + 1
        mine.append((depth, frame.f_code.co_qualname, name))

    run_ranks({"tp": 1, "pp": 2, "dp": 1}, work)
    return [
        "\n".join(f"{'  ' * depth + function:<58}{name}" for depth, function, name in _plain(mine)) for mine in steps
    ]


def _plain(steps: list[tuple[int, str, str]]) -> Iterator[tuple[int, str, str]]:
    for depth, function, name in steps:
        yield depth, re.sub(r"\.?<(locals|lambda|genexpr|listcomp|dictcomp)>.*", "", function), name


def _name_of(frame: Any) -> str | None:
    """The file of a frame, where it is one of the house and on the way."""
    path = frame.f_code.co_filename
    if not path.startswith(f"{ROOT}/") or "/.venv/" in path or path.startswith(f"{ROOT}/tests/"):
        return None
    name = path.removeprefix(f"{ROOT}/").removeprefix("megatron/")
    return None if name.startswith(BESIDE) else name


def pictures() -> dict[str, str]:
    torch.set_num_threads(1)
    first, last = ways()
    return {"floors": floors(), "way-of-the-first-stage": first, "way-of-the-last-stage": last}


def with_pictures(page: str) -> str:
    """The page with its pictures as the code is now: each stands in a block of code behind a line `<!-- picture: NAME -->`."""
    for name, text in pictures().items():
        mark = f"<!-- picture: {name} -->\n```\n"
        assert mark in page, f"{PAGE.name} has no place for the picture {name}"
        before, after = page.split(mark)
        page = f"{before}{mark}{text}\n```{after.split('```', 1)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text()))
