"""A folder that is written while its checkpoint is read: in parts of any size, of any layout's pieces, and never of damaged ones."""

from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from cases import read_tensors, write_folders
from local_ranks import run_ranks

from megatron.convert import copy_checkpoint, open_any, stream_checkpoint_to_hf_folder, write_hf_folder
from megatron.convert.families.strided_views_of_hf_weights import OPERATIONS, HeadCounts, contiguous_copy_ranges
from megatron.convert.plan_hf_folder import to_hf_tensors
from megatron.core.dist_checkpointing import CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.sharding.boxes import whole

HEADS = HeadCounts(6, 2, 4)
CASES = ["gpt2", "llama", "qwen2", "phi3"]  # transposed; rows of groups, with biases; rows of one tensor


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ours")
    folders = write_folders(root, CASES)
    for case, folder in folders.items():
        copy_checkpoint(open_any(folder), root / f"{case}-ours")
    return folders


SWEPT = ("qwen2_moe", "qwen2_moe-window", "qwen3_moe", "olmoe")  # beside mixtral and gpt_oss
# Of experts, which have shapes of their own: [experts, 2, f, h], [experts, h, f] or [experts, 2, f].
OF_EXPERTS = {
    **{"experts_gate_up": (3, 2, 4, 5), "experts_down": (3, 5, 4), "stacked_gate_up_in_turn": (3, 2, 4, 5)},
    **{"stacked_gate_up_bias": (3, 2, 4), "stacked_transpose": (3, 5, 4)},
    "stacked_gate_up": (3, 2, 4, 5),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("more", [(), (3,)])
def test_stretches_are_what_the_operation_does(operation: str, more: tuple[int, ...]):
    rows = sum(HEADS.rows[1:] if operation == "kv" else HEADS.rows)
    shape = OF_EXPERTS.get(operation, (rows, *more))
    x = torch.arange(prod(shape)).view(shape)
    if operation == "flat" and more:
        pytest.skip("of one dimension")
    theirs = torch.cat([one.reshape(-1) for one in to_hf_tensors(operation, HEADS, x)])
    scatters = {"qkv_pairs", "stacked_gate_up_in_turn", "stacked_gate_up_bias", "stacked_transpose"}
    scatters |= {"transpose", "qkv_transpose"} if more else set()
    if (stretches := contiguous_copy_ranges(operation, HEADS, tuple(x.shape))) is None:
        assert operation in scatters
        return
    assert operation not in scatters
    found = torch.full_like(theirs, -1)
    for start, stop, to in stretches:
        found[to : to + stop - start] = x.reshape(-1)[start:stop]
    assert torch.equal(found, theirs)


@pytest.mark.full
@pytest.mark.parametrize("nbytes", [8, 56, 1 << 20])
@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in CASES])
def test_parts_of_any_size_make_the_same_folder(
    case: str, nbytes: int, ours: dict[str, Path], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(stream_checkpoint_to_hf_folder, "_PART_BYTES", nbytes)
    checkpoint = open_checkpoint(ours[case].with_name(f"{case}-ours"))
    write_hf_folder(checkpoint, tmp_path / "out", most_bytes=3000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert read_tensors(tmp_path / "out") == read_tensors(ours[case])


def save_pieces(mesh, source: Path, root: Path) -> None:
    """Each rank has half of the rows of each tensor of even size, or of the columns where their number is a multiple of 8."""
    checkpoint, rank = open_checkpoint(source), mesh["dp"].rank
    tensors = {}
    for name, record in checkpoint.manifest.tensors.items():
        box = [list(span) for span in whole(record.shape)]
        dim = 1 if len(record.shape) > 1 and record.shape[1] % 8 == 0 else 0
        half, divided = record.shape[dim] // 2, record.shape[dim] % 2 == 0
        if divided:
            box[dim] = [rank * half, (rank + 1) * half]
        box = tuple(map(tuple, box))
        values = torch.empty([stop - start for start, stop in box], dtype=getattr(torch, record.dtype))
        tensors[name] = LocalTensor(values, record.shape, [(box, whole(tuple(values.shape)))], divided or rank == 0)
    checkpoint.read_into(tensors)
    save_checkpoint(root, 1, tensors, checkpoint.state, mesh["dp"])


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_pieces_of_rows_and_of_columns_make_the_same_folder(
    case: str, ours: dict[str, Path], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(stream_checkpoint_to_hf_folder, "_PART_BYTES", 40)
    run_ranks({"dp": 2}, partial(save_pieces, source=ours[case].with_name(f"{case}-ours"), root=tmp_path / "pieces"))
    checkpoint = open_checkpoint(tmp_path / "pieces")
    assert {checkpoint.has_runs(name) for name in checkpoint.names} == {False, True}
    write_hf_folder(checkpoint, tmp_path / "out", most_bytes=3000)
    assert read_tensors(tmp_path / "out") == read_tensors(ours[case])


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_damaged_piece_ends_the_writing_and_no_folder_is_there(
    how: str, place: str, ours: dict[str, Path], tmp_path: Path
):
    root = tmp_path / "ours"
    copy_checkpoint(open_any(ours["llama"]), root)
    (path,) = root.glob("iter_*/*.bin")
    checkpoint, data = open_checkpoint(root), bytearray(path.read_bytes())
    data[0 if place == "first" else -1] ^= 1
    path.write_bytes(data if how == "changed" else data[: 1 if place == "first" else -1])
    with pytest.raises(CheckpointError, match="sha256" if how == "changed" else "ends before"):
        write_hf_folder(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_does_not_take_what_was_written_ends_it(ours: dict[str, Path], tmp_path: Path, monkeypatch):
    """The disk says so while a later file is made."""

    def fail(file) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.core.storage.file_layer.local.sync", fail)
    with pytest.raises(OSError, match="No space"):
        write_hf_folder(open_checkpoint(ours["llama"].with_name("llama-ours")), tmp_path / "out", most_bytes=3000)
    assert not (tmp_path / "out").exists()
