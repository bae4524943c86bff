"""A new axis touches few files: docs/architecture.md lists, with reasons, those that name context parallelism outside its own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"context[-_ ]?parallel|(\b|_)cp(\b|_)", re.IGNORECASE)
OWN = ("core/context_parallel/", "core/parallel/sequence_shard.py", "core/parallel/parallel_config.py")
ROOMS = (
    "core/parallel_state.py",
    "core/classic/",
    "training/classic/",
    "deepspeed/",
)  # of Megatron's and DeepSpeed's names
MOST = 12


def files_that_name_it() -> set[str]:
    paths = ((path, path.relative_to(ROOT / "megatron").as_posix()) for path in (ROOT / "megatron").rglob("*.py"))
    return {name for path, name in paths if not name.startswith((*OWN, *ROOMS)) and NAMED.search(path.read_text())}


def test_the_files_that_name_an_axis_are_those_listed_with_a_reason():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| `(\S+)` \| (.+) \|$", re.search(r"axis: begin(.*)axis: end", page, re.DOTALL)[1], re.MULTILINE
    )
    assert files_that_name_it() == {name for name, _ in rows} and len(rows) <= MOST
    assert all(len(reason) > 20 for _, reason in rows)


def test_its_own_files_and_the_rooms_exist():
    assert all((ROOT / "megatron" / name).exists() for name in (*OWN, *ROOMS))
