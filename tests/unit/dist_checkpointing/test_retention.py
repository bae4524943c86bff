"""Older checkpoints are deleted once newer ones are whole, and only those of the run; a kill in between leaves nothing that misleads."""

import os
import shutil
from pathlib import Path

import pytest
from small_checkpoints import refused, save_one

from megatron.core.dist_checkpointing import manifest_format as disk, open_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import (
    iteration_in_pointer_file,
    pointer_text_with_check_digit,
    saved_iterations,
)
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import try_clear_leftovers
from megatron.core.dist_checkpointing.retention import delete_older
from megatron.core.storage import file_layer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the iterations 1 to 8, of which 3 was saved by nobody that the tests ask for."""
    folder = save_one(tmp_path, 8)
    text = (folder / disk.MANIFEST).read_text()
    for iteration in range(1, 8):
        manifest = disk.parse_manifest(text, "m")
        copy = tmp_path / disk.folder_name(iteration)
        shutil.copytree(folder, copy)
        changed = disk.Manifest(iteration, manifest.state, manifest.files, manifest.tensors)
        (copy / disk.MANIFEST).write_text(disk.to_json(changed))
    return tmp_path


MINE = [1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "keep, interval, spared, left",
    [
        (1, None, (), [3, 8]),
        (2, None, (), [3, 7, 8]),
        (2, 2, (), [2, 3, 4, 6, 7, 8]),
        (1, 4, (5,), [3, 4, 5, 8]),
        (9, None, (), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_newest_the_retained_and_those_of_others_stay(root, keep, interval, spared, left):
    deleted, problems = delete_older(root, MINE, keep, interval, spared)
    assert saved_iterations(root) == left and not problems
    assert sorted(deleted) == [number for number in MINE if number not in left]
    assert {path.name for path in root.iterdir()} == {disk.LATEST, *map(disk.folder_name, left)}


def test_a_damaged_checkpoint_does_not_count_among_those_kept(root):
    """Of a shortened file, a missing one and a manifest with another bit, none stands for a checkpoint to go back to."""
    (root / "iter_0000007/rank_00000.bin").write_bytes(b"short")
    (root / "iter_0000006/rank_00000.bin").unlink()
    text = (root / "iter_0000005/manifest.json").read_text()
    (root / "iter_0000005/manifest.json").write_text(text.replace("48", "49", 1))
    delete_older(root, MINE, 2)
    assert saved_iterations(root) == [3, 4, 5, 6, 7, 8]


def test_a_link_is_never_followed(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "iter_0000002"
    (root / "iter_0000002").rename(elsewhere)
    (root / "iter_0000002").symlink_to(elsewhere)
    delete_older(root, MINE, 1)
    assert saved_iterations(root) == [2, 3, 8] and (elsewhere / "rank_00000.bin").is_file()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_killed_deletion_is_finished_by_the_next_start(root, call, monkeypatch):
    """At any call that changes the disk: what is left either is whole or is never read, and goes."""
    count = 0

    def dying(function):
        def wrapped(*arguments, **more):
            nonlocal count
            count += 1
            if count == call:
                raise Killed
            return function(*arguments, **more)

        return wrapped

    with monkeypatch.context() as patch, pytest.raises(Killed):
        for name in ("replace", "unlink", "rmdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        delete_older(root, MINE, 6)
    for iteration in saved_iterations(root):
        open_checkpoint(root, iteration)
    assert not try_clear_leftovers(root)
    assert saved_iterations(root) == ([1, 2, 3, 4, 5, 6, 7, 8] if call == 1 else [2, 3, 4, 5, 6, 7, 8])
    assert {path.name for path in root.iterdir()} == {disk.LATEST, *map(disk.folder_name, saved_iterations(root))}


def test_a_folder_that_cannot_be_removed_is_told_of(root, monkeypatch):
    def busy(*arguments, **more):
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(file_layer, "remove_tree", busy)
        deleted, problems = delete_older(root, MINE, 6)
    assert deleted == [] and "iter_0000001" in problems[0] and "busy" in problems[0]
    assert saved_iterations(root) == [2, 3, 4, 5, 6, 7, 8] and not try_clear_leftovers(root)


# ---------------------------------------------------------------- the pointer


@pytest.mark.parametrize("iteration", [7, 12345])
def test_no_bit_of_the_pointer_can_change_unseen(root, iteration):
    pointer, content = root / disk.LATEST, pointer_text_with_check_digit(iteration).encode()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        pointer.write_bytes(changed)
        with refused(disk.LATEST):
            iteration_in_pointer_file(root)
    pointer.write_bytes(content)
    assert iteration_in_pointer_file(root) == iteration == int(content)


def test_a_pointer_written_by_hand_or_by_megatron_is_followed(root):
    for text in ("8", "8\n", " 8\n\n", "8\r\n"):
        (root / disk.LATEST).write_bytes(text.encode())
        assert iteration_in_pointer_file(root) == 8
