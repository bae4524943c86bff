"""Draws the two pictures of docs/architecture.md from the code: the levels, and a batch's way through them.

python tests/campaigns/architecture_doc.py

The levels are those of tests/package_graph.py. The way is recorded: one training step of both ranks of a pipeline of two, ranks
as threads. Each file stands once, where a function of it is entered first, below its caller's.
"""

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))
sys.path.insert(3, str(Path(__file__).resolve().parents[1]))

from local_ranks import run_ranks
from package_graph import LEVELS
from script_run import trainer_of

import pretrain_gpt
from megatron.core.parallel.mesh import Mesh

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 116
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer --lr 1e-3 --mock-data --eval-iters 0 --num-workers 0 --device cpu "
    "--tokenizer-type NullTokenizer --vocab-size 30"
)
# Asked for facts, or an observer: no station of a batch.
BESIDE = (
    "training/arguments",
    "training/monitor",
    "training/fault_tolerance",
    "training/memory",
    "training/global_vars.py",
    "core/base",
    "core/sharding/boxes.py",
    "core/parallel/global_state.py",
    "core/parallel/accelerator.py",
    "core/parallel/mesh.py",
    "core/distributed/data_parallel_config.py",
    "core/parallel_state.py",
    "core/timers.py",
)


def levels() -> str:
    """A line or more for each level, from the top: its packages and files."""
    rows = [["tools", "pretrain_*.py", "examples", "tests"], *(packages.split() for packages in reversed(LEVELS))]
    lines = []
    for number, row in zip(range(len(rows) - 1, -1, -1), rows):
        head = f"{number:2}  "
        for box in (f"[{name}]" for name in row):
            if len(head) + len(box) > WIDTH:
                lines, head = [*lines, head.rstrip()], "    "
            head += f"{box} "
        lines.append(head.rstrip())
    return "\n".join(lines) + "\n"


@dataclass
class Station:
    """A function on the way of a batch, the ranks that enter it from here, and the functions of other files entered from it."""

    ranks: str = "both"
    below: dict[tuple[str, str], "Station"] = field(default_factory=dict)


def way() -> str:
    """The functions of one step, each once and below its caller, as they are entered; at the end, which of two pipeline ranks does."""
    ways = [Station("first"), Station("last")]

    def work(mesh: Mesh) -> None:
        seen: set[tuple] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            stations = _stack(frame) if event == "call" and _is_station(frame.f_code) else []
            # A collective stands below each of its callers.
            key = tuple(stations[: 2 if stations and stations[0][1] == "core/parallel/collectives.py" else 1])
            if not key or key in seen:
                return
            seen.add(key)
            here, last_file = ways[mesh["pp"].rank], None
            for function, file in reversed(stations):
                if file != last_file:
                    here = here.below.setdefault((function, file), Station(here.ranks))
                    last_file = file

        with trainer_of(pretrain_gpt, mesh, FLAGS) as run:
            sys.setprofile(note if mesh["tp"].rank == mesh["dp"].rank == 0 else None)
            try:
                run._train()
            finally:
                sys.setprofile(None)

    run_ranks({"tp": 2, "pp": 2, "dp": 2}, work)
    return "\n".join(_drawn(_merged(*ways), 0)) + "\n"


def _merged(first: Station, last: Station) -> Station:
    """Both ways in one; a station of the last rank alone stands behind the one before it there."""
    names = list(first.below)
    place = 0
    for name in last.below:
        if name not in first.below:
            names.insert(place, name)
        place = max(place, names.index(name) + 1)
    both = {name: (first.below.get(name), last.below.get(name)) for name in names}
    return Station("both", {name: _merged(*pair) if all(pair) else pair[0] or pair[1] for name, pair in both.items()})


def _drawn(station: Station, depth: int) -> list[str]:
    lines = []
    for (function, file), below in station.below.items():
        name = ("  " * depth + function).ljust(58)
        lines += [f"{name}{file:<50}{'' if below.ranks == 'both' else below.ranks}".rstrip(), *_drawn(below, depth + 1)]
    return lines


def _stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """The functions that are entered, with their files, innermost first."""
    found = []
    while frame is not None:
        if (file := _file(frame.f_code)) is not None:
            found.append((_name(frame.f_code), file))
        frame = frame.f_back
    return found


@cache
def _name(code: CodeType) -> str:
    """A function in a function, and a comprehension, go by the name of what they stand in."""
    return code.co_qualname.partition(".<locals>")[0].partition(".<")[0]


@cache
def _is_station(code: CodeType) -> bool:
    """A module's forward; else no helper, and no question that is answered in a line or two."""
    is_long = len({line for _, _, line in code.co_lines()}) > 3
    return (
        _file(code) is not None and _name(code).split(".")[-1][0] not in "_<" and (is_long or code.co_name == "forward")
    )


@cache
def _file(code: CodeType) -> str | None:
    """The file of a function, where it is the project's and on the way."""
    path = code.co_filename
    if not path.startswith(f"{ROOT}/") or "/.venv/" in path or path.startswith(f"{ROOT}/tests/"):
        return None
    name = path.removeprefix(f"{ROOT}/").removeprefix("megatron/")
    return None if name.startswith(BESIDE) else name


MARK = "<!-- picture: {} -->\n```\n"  # the picture follows, and a line ```


def picture(page: str, name: str) -> str:
    """A picture as it stands in the page."""
    return page.split(MARK.format(name))[1].partition("```\n")[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    for name, drawn in (("levels", levels()), ("way", way())):
        text = text.replace(MARK.format(name) + picture(text, name), MARK.format(name) + drawn)
    PAGE.write_text(text)
