"""A save that is killed or fails anywhere leaves a whole checkpoint, which the next start finds, and nothing that is in its way."""

import os
import shutil
import warnings

import pytest
import torch
from failing_files import Killed, failing
from small_checkpoints import good, loaded, save_one, tried_by_ranks

from megatron.core.dist_checkpointing import CheckpointError, manifest_format as disk, open_checkpoint
from megatron.core.storage import file_layer


@pytest.fixture(autouse=True)
def never_synced(monkeypatch):
    """No test cuts the power, and waiting for the disk takes most of the time of a small save."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def changes(call):
    return call.changes_disk


def dies(root, iteration, value, at, how):
    """Save `value` and fail or die at this call; (what was raised, what was warned of), or None when there is no such call."""
    x = torch.full((3, 4), value)
    with warnings.catch_warnings(record=True) as warned, failing(at, how, only=changes) as calls:
        warnings.simplefilter("always")
        try:
            save_one(root, iteration, w=x, v=x)
        except (Killed, CheckpointError) as raised:
            return raised, warned
    return None if calls.hit is None else (None, warned)


def held(root, iteration=None):
    """The one value that both tensors of a checkpoint hold; None where there is no checkpoint."""
    try:
        values = [loaded(root, iteration, name).unique().tolist() for name in ("w", "v")]
    except CheckpointError:
        return None
    assert values[0] == values[1] and len(values[0]) == 1, "never a part of the old and a part of the new"
    return values[0][0]


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed in", "ENOSPC in"])
@pytest.mark.parametrize("before, iteration", [([], 1), ([1], 2), ([1], 1)], ids=["first", "new", "again"])
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(tmp_path, before, iteration, how):
    """At every call that changes the disk, one after the other; the next save needs no help, and nothing is left over."""
    for dies_at in range(1, 100):
        root = tmp_path / str(dies_at)
        root.mkdir()
        for number in before:
            save_one(root, number, w=torch.zeros(3, 4), v=torch.zeros(3, 4))
        ended = dies(root, iteration, 1.0, dies_at, how)
        if ended is None:
            break
        raised, warned = ended
        if raised is None:  # what only clears away after a save may fail
            assert held(root) == held(root, iteration) == 1, dies_at
            assert all("cannot be removed" in str(problem.message) for problem in warned)
        elif isinstance(raised, CheckpointError):
            left = open_checkpoint(root).iteration if saved_numbers(root) else None
            said = (
                "there is no checkpoint in" if left is None else f"the latest checkpoint is intact (iteration {left})"
            )
            assert said in str(raised) and "No space left on device" in str(raised), dies_at
        for number in before:
            assert held(root, number) in ([0, 1] if number == iteration else [0]), dies_at
        assert held(root) in ([0, 1] if before else [None, 1]), dies_at
        assert (held(root) is None) == (not saved_numbers(root)), (
            "what is complete is loaded, whatever the pointer says"
        )
        save_one(root, 3, w=torch.full((3, 4), 3.0), v=torch.full((3, 4), 3.0))
        assert held(root) == 3
        assert {path.name for path in root.iterdir()} == {disk.LATEST} | {f"iter_{n:07d}" for n in saved_numbers(root)}
    assert dies_at > 15, "there are so many calls"


def saved_numbers(root):
    """Iterations that are there, under their own name or set aside."""
    return sorted(
        {int(path.parent.name[5:12]) for path in root.glob("iter_*/manifest.json") if ".partial" not in str(path)}
    )


def test_what_cannot_be_removed_does_not_undo_a_save(tmp_path, monkeypatch):
    """The older folder of an iteration stays under its other name, is told of, and goes with the next save."""

    def busy(folder):
        raise OSError(16, "Device or resource busy")

    save_one(tmp_path, 1, w=torch.zeros(3, 4))
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"iter_0000001\.replaced"):
        patch.setattr(file_layer, "remove_tree", busy)
        save_one(tmp_path, 1, w=torch.ones(3, 4))
    assert loaded(tmp_path).eq(1).all()
    save_one(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", disk.LATEST}


@pytest.mark.parametrize("whole", [True, False], ids=["replaced", "damaged"])
def test_an_iteration_is_saved_again_and_again_though_nothing_can_be_removed(tmp_path, monkeypatch, whole):
    """As where the folders are another user's: what is in the way gets another name, and goes once that works."""

    def forbidden(folder):
        raise PermissionError(13, "Permission denied")

    folder = save_one(tmp_path, 1)
    (tmp_path / "iter_0000001.partial").mkdir()
    if not whole:
        shutil.copytree(folder, tmp_path / "iter_0000001.replaced")
        (folder / "rank_00000.bin").write_bytes(b"short")
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(file_layer, "remove_tree", forbidden)
        for value in (1.0, 2.0, 3.0):
            save_one(tmp_path, 1, w=torch.full((3, 4), value))
            assert loaded(tmp_path).eq(value).all()
    assert warned and all("cannot be removed" in str(problem.message) for problem in warned)
    save_one(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", disk.LATEST}


def test_the_only_whole_folder_of_an_iteration_is_never_removed(tmp_path):
    folder = save_one(tmp_path, 1)
    shutil.copytree(folder, tmp_path / "iter_0000001.replaced")
    (folder / "rank_00000.bin").write_bytes(b"short")
    save_one(tmp_path, 2)
    shutil.rmtree(folder)
    assert loaded(tmp_path, 1).equal(torch.arange(12.0).view(3, 4))
    save_one(tmp_path, 3)
    assert {path.name for path in tmp_path.iterdir()} == {*(f"iter_000000{n}" for n in (1, 2, 3)), disk.LATEST}


def test_a_damaged_folder_is_saved_over_while_a_whole_one_is_set_aside(tmp_path):
    folder = save_one(tmp_path, 1)
    shutil.copytree(folder, tmp_path / "iter_0000001.replaced")
    (folder / "rank_00000.bin").write_bytes(b"short")
    save_one(tmp_path, 1, w=torch.ones(3, 4))
    assert loaded(tmp_path).eq(1).all()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", disk.LATEST}


POINTERS_AND_SAID = [
    ("12", 12, ""),
    (" 12\n\n", 12, ""),
    ("3", 3, "names iteration 3, and iteration 12 is there"),
    (None, 12, "iteration 12 is loaded"),
]


@pytest.mark.parametrize("pointer, loaded, said", POINTERS_AND_SAID)
def test_an_iteration_that_is_not_the_newest_is_loaded_with_a_warning(tmp_path, pointer, loaded, said):
    save_one(tmp_path, 3)
    save_one(tmp_path, 12).rename(tmp_path / "iter_0000012.replaced")
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000200.partial").mkdir()
    (tmp_path / disk.LATEST).unlink() if pointer is None else (tmp_path / disk.LATEST).write_text(pointer)
    for checkpoint in good(tried_by_ranks(2, lambda world: open_checkpoint(tmp_path, world=world))):
        assert checkpoint.iteration == loaded and said in checkpoint.warning and bool(said) == bool(checkpoint.warning)
    assert not open_checkpoint(tmp_path, 3).warning
