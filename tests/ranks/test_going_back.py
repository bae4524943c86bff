"""Whole runs of one rank that resume from another checkpoint than the newest: asked to, or because of damage."""

import json
import re
import shutil
from pathlib import Path

import pytest
from said import tells

from megatron.core.checkpoint import format as disk


def trained(text: str) -> list[int]:
    """The iterations of a run, by its log."""
    return [int(number) for number in re.findall(r"iteration +(\d+)/", text)]


def warnings_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("WARNING")]


def hashes(root: Path, iteration: int) -> dict:
    """Equal bits, equal hashes."""
    tensors = json.loads((root / f"iter_{iteration:07d}/manifest.json").read_text())["tensors"]
    return {name: [piece["sha256"] for piece in record["pieces"]] for name, record in tensors.items()}


@pytest.fixture
def root(checkpoints: Path, tmp_path: Path) -> Path:
    """A folder with the checkpoints of iterations 2 and 4."""
    return shutil.copytree(checkpoints, tmp_path / "books")


def iterations_in(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*") if path.name[5:].isdigit())


# ---------------------------------------------------------------- asked to


def test_ckpt_step_resumes_from_that_iteration(root, said, refused):
    text = said(f"--train-iters 4 --load {root} --ckpt-step 2")
    assert trained(text) == [3, 4] and not warnings_of(text)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert trained(said(f"--train-iters 4 --load {root} --ckpt-step 2")) == [3, 4]
    assert tells(refused(f"--train-iters 4 --load {root} --ckpt-step 3"), "iter_0000003 2 4")
    assert tells(refused(f"--train-iters 4 --load {root}/new --save {root}/new --ckpt-step 2"), "--ckpt-step 2")


def test_the_same_command_with_ckpt_step_goes_on_from_what_it_has_saved(root, said):
    command = (
        f"--train-iters 6 --override-opt_param-scheduler --save-interval 1 --load {root} --save {root} --ckpt-step 2"
    )
    assert trained(said(f"{command} --exit-interval 3")) == [3]
    text = said(command)
    assert trained(text) == [4, 5, 6] and len(warnings_of(text)) == 1 and "--ckpt-step 2" in warnings_of(text)[0]


# ---------------------------------------------------------------- what is kept


def test_a_run_keeps_its_newest_checkpoints_over_restarts_and_those_of_others(root, said):
    """2 and 4 were there before the run, which does not load them."""
    flags = f"--train-iters 9 --save {root} --save-interval 3 --save-retain-interval 6"
    said(f"{flags} --exit-interval 5")
    assert iterations_in(root) == [2, 4, 5]
    said(f"{flags} --load {root}")
    assert iterations_in(root) == [2, 4, 6, 9]
    said(
        f"--train-iters 12 --override-opt_param-scheduler --save {root} --save-interval 1 --load {root} --keep-checkpoints 2"
    )
    assert iterations_in(root) == [2, 4, 11, 12]


def test_the_saved_list_of_checkpoints_must_be_one(root, refused):
    path = root / "iter_0000004/manifest.json"
    for value, told in ((["../x"], "'../x'"), (7, "7"), ([-4], "-4")):
        manifest = disk.parse_manifest(path.read_text(), path)
        manifest.state["train"]["checkpoints"] = value
        path.write_text(disk.to_json(manifest))
        assert tells(refused(f"--train-iters 6 --load {root}"), f"train/checkpoints {told}")
