"""Whole runs of one rank that resume from another checkpoint than the newest: asked to, or because of damage."""

import json
import re
import shutil
from pathlib import Path

import pytest
from independent_reader import differing, read
from local_ranks import run_ranks
from said import tells
from tiny_run import TINY_GPT2, Layout, TinyTrainer

from megatron.core.dist_checkpointing import manifest_format as disk
from megatron.core.distributed.data_parallel import DataParallelConfig


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


@pytest.mark.full
def test_ckpt_step_resumes_from_that_iteration(root, said, refused):
    text = said(f"--train-iters 4 --load {root} --ckpt-step 2")
    assert trained(text) == [3, 4] and not warnings_of(text)
    (root / "latest_checkpointed_iteration.txt").unlink()
    assert trained(said(f"--train-iters 4 --load {root} --ckpt-step 2")) == [3, 4]
    assert tells(refused(f"--train-iters 4 --load {root} --ckpt-step 3"), "iter_0000003 2 4")
    assert tells(refused(f"--train-iters 4 --load {root}/new --save {root}/new --ckpt-step 2"), "--ckpt-step 2")


@pytest.mark.full
def test_the_same_command_with_ckpt_step_goes_on_from_what_it_has_saved(root, said):
    command = (
        f"--train-iters 6 --override-opt_param-scheduler --save-interval 1 --load {root} --save {root} --ckpt-step 2"
    )
    assert trained(said(f"{command} --exit-interval 3")) == [3]
    text = said(command)
    assert trained(text) == [4, 5, 6] and len(warnings_of(text)) == 1 and "--ckpt-step 2" in warnings_of(text)[0]


# ---------------------------------------------------------------- what is kept


@pytest.mark.full
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
        manifest.state["checkpoints"] = value
        path.write_text(disk.to_json(manifest))
        assert tells(refused(f"--train-iters 6 --load {root}"), f"checkpoints {told}")


# ---------------------------------------------------------------- because of damage


def flip(path: Path, at: int = -1) -> Path:
    """One bit of a file; the middle of it by default."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at < 0 else at] ^= 4
    path.write_bytes(content)
    return path


DAMAGES = {
    "a tensor": lambda folder: flip(folder / "rank_00000.bin"),
    "the manifest": lambda folder: flip(folder / "manifest.json"),
    "the manifest's head": lambda folder: flip(folder / "manifest.json", 14),
    "a file lost": lambda folder: (folder / "rank_00000.bin").unlink(),
    "a file cut short": lambda folder: (folder / "rank_00000.bin").write_bytes(b"short"),
    "the manifest lost": lambda folder: (folder / "manifest.json").unlink(),
    "all lost": lambda folder: shutil.rmtree(folder),
}


@pytest.mark.full
@pytest.mark.parametrize("what", DAMAGES)
def test_a_run_goes_on_from_the_newest_undamaged_checkpoint_and_says_so(what, root, checkpoints, said, refused):
    """It ends in the weights of a run that was not stopped; the damaged folder keeps another name."""
    DAMAGES[what](root / "iter_0000004")
    flags = f"--train-iters 4 --save-interval 2 --load {root} --save {root}"
    message = refused(f"{flags} --exit-on-damaged-checkpoint") if what != "a tensor" else ""
    assert not message or tells(message, "iter_0000004")
    text = said(flags)
    assert trained(text) == [3, 4] and hashes(root, 4) == hashes(checkpoints, 4)
    assert any(tells(line, "iteration 2") and "iter_0000004" in line for line in warnings_of(text))
    assert (root / "iter_0000004.damaged").is_dir() == (what != "all lost")
    assert not warnings_of(said(flags))


def test_damage_everywhere_is_never_followed_by_a_start_from_nothing(root, refused):
    for iteration in (2, 4):
        flip(root / f"iter_000000{iteration}/rank_00000.bin")
    message = refused(f"--train-iters 4 --load {root} --save {root}")
    assert tells(message, "iteration 4 2 rank_00000.bin --ckpt-step")
    assert iterations_in(root) == [2, 4]
    (root / "iter_0000004/manifest.json").unlink()
    shutil.rmtree(root / "iter_0000002")
    assert tells(refused(f"--train-iters 4 --load {root} --save {root}"), "iter_0000004 manifest.json")


@pytest.mark.parametrize("flags", ["--finetune", "--ckpt-step 4", "--exit-on-damaged-checkpoint"])
def test_only_a_resumed_run_goes_back_by_itself(flags, root, refused):
    flip(root / "iter_0000004/rank_00000.bin", 0)
    assert tells(refused(f"--train-iters 6 --load {root} {flags}"), "iter_0000004/rank_00000.bin sha256")


@pytest.mark.full
def test_a_damaged_pointer_is_told_of_and_the_newest_checkpoint_is_used(root, said):
    for content in (b"6\n\n\n\n", b"4\n\n\n\n\n\n", b"\xff", b"9", b"release"):
        (root / "latest_checkpointed_iteration.txt").write_bytes(content)
        text = said(f"--train-iters 4 --load {root}")
        (warning,) = warnings_of(text)
        assert tells(warning, "iteration 4") and trained(text) == [], content
    assert "latest_checkpointed_iteration.txt" in warning


@pytest.mark.full
def test_a_checkpoint_of_another_branch_is_not_gone_back_to(root, said, refused):
    """4 is damaged; 3 was saved by another run that went its own way from 2, so 2 is the one to go on from."""
    said(f"--train-iters 4 --load {root} --save {root} --ckpt-step 2 --override-opt_param-scheduler --exit-interval 3")
    shutil.copytree(root / "iter_0000003", root.parent / "other")
    shutil.rmtree(root / "iter_0000003")
    said(f"--train-iters 4 --load {root} --save {root} --ckpt-step 2 --save-interval 4")
    shutil.copytree(root.parent / "other", root / "iter_0000003")
    flip(root / "iter_0000004/rank_00000.bin")
    assert trained(said(f"--train-iters 4 --load {root}")) == [3, 4]


TARGETS = [
    Layout(dp=2, tp=2, data_parallel=DataParallelConfig(zero_stage=3)),
    Layout(dp=2, pp=2, m=2, data_parallel=DataParallelConfig(use_distributed_optimizer=True)),
]


@pytest.mark.full
@pytest.mark.parametrize(("file", "target"), [*zip(("rank_00000.bin", "rank_00001.bin"), TARGETS)], ids=str)
def test_what_one_rank_finds_damaged_no_rank_uses(file, target, tmp_path):
    """Two ranks have saved 2 and 4; the last tensors of a file of 4 are damaged, and others were read before them. Every tensor is
    that of 2, as a save afterwards shows."""
    source = Layout(dp=2, data_parallel=DataParallelConfig(use_distributed_optimizer=True))

    def train(mesh):
        trainer = TinyTrainer(mesh, TINY_GPT2, source)
        for iteration in (2, 4):
            trainer.step(iteration)
            trainer.save(tmp_path, iteration)

    def go_on(mesh):
        trainer = TinyTrainer(mesh, TINY_GPT2, target)
        trainer.load(tmp_path)
        trainer.save(tmp_path, 6)
        trainer.close()

    run_ranks(source.sizes, train)
    last = flip(tmp_path / "iter_0000004" / file, (tmp_path / "iter_0000004" / file).stat().st_size - 1)
    run_ranks(target.sizes, go_on)
    assert iterations_in(tmp_path) == [2, 6] and (tmp_path / "iter_0000004.damaged" / last.name).is_file()
    saved, again = (read(tmp_path / f"iter_000000{number}") for number in (2, 6))
    assert again.tensors and not differing(again.tensors, saved.tensors)
