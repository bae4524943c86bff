"""Whole runs, their copies and their writers ask the system about files through the file layer alone: what a double fails, it fails for all."""

import os
from pathlib import Path

import pytest
import torch
from cases import CASES, write_folders
from stopped_runs import ended, job, lines
from traced_files import traced

from megatron.convert import open_any
from megatron.core.dist_checkpointing import LocalTensor
from megatron.core.sharding.boxes import whole

COPIES = "--non-persistent-save-interval 1 --non-persistent-ckpt-type "
RUNS = {
    "one kept": "--use-distributed-optimizer --keep-checkpoints 1",
    "async": "--tensor-model-parallel-size 2 --async-save",
    "local copies": COPIES + "local --non-persistent-local-ckpt-dir {root}/disk",
    "global copies": COPIES + "global",
}
# They change nothing and read nothing: whether two names are one folder, where links of a folder lead; and the lock of --save.
LOCK = ("open", "training.checkpointing.check_and_lock_save_folder._lock")
ALLOWED = {
    "core.storage.path_or_url.same_folder",
    "training.checkpointing.non_persistent_checkpoint._name_of",
    "convert.formats.hf_config_and_safetensors_headers.path_inside",
}


def others(beside: list[tuple[str, str]]) -> list[tuple[str, str]]:
    asks = ("stat", "lstat", "readlink")
    return [one for one in beside if one != LOCK and not (one[0] in asks and one[1] in ALLOWED)]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == "one kept" else pytest.param(name, marks=pytest.mark.full) for name in RUNS]
)
def test_a_run_that_saves_and_goes_on_asks_only_through_the_layer(name: str, tmp_path: Path):
    flags = f"--train-iters 4 --save-interval 2 --save {tmp_path}/run --load {tmp_path}/run --global-batch-size 2 "
    flags += RUNS[name].format(root=tmp_path)
    sizes = {"tp": 2} if "tensor" in flags else {"dp": 2}
    with traced(tmp_path) as trace:
        job(flags + " --exit-interval 3", **sizes)
        said = job(flags, **sizes)
    assert list(lines(said)) == ["4"] and ended(tmp_path / "run") and LOCK in trace.beside
    assert not others(trace.beside)


@pytest.mark.full
def test_a_model_of_another_project_is_read_through_the_layer(tmp_path: Path):
    root = next(iter(write_folders(tmp_path, CASES).values()))
    with traced(tmp_path) as trace:
        found = open_any(root)
        boxes = {name: whole(record.shape) for name, record in found.manifest.tensors.items()}
        dtypes = {name: getattr(torch, record.dtype) for name, record in found.manifest.tensors.items()}
        tensors = {
            name: LocalTensor(
                torch.empty([b for _, b in box], dtype=dtypes[name]), [b for _, b in box], [(box, box)], False
            )
            for name, box in boxes.items()
        }
        found.read_into(tensors)
    assert {call.kind for call in trace.calls} > {"open", "read_into", "stat"}
    assert not others(trace.beside)


@pytest.mark.full
def test_a_file_url_is_a_folder_of_this_machine_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A `Path` of it would be a folder `file:` below the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = f"file://{tmp_path}/run"
    flags = f"--train-iters 4 --save-interval 2 --save {place} --load {place} --log-progress {COPIES}global"
    job(flags + " --exit-interval 3")
    assert list(lines(job(flags))) == ["4"]
    assert not os.listdir(tmp_path / "here") and (tmp_path / "run" / "progress.txt").exists()
