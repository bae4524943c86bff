"""What any layout saves, any other loads, to the bit; and what is damaged, missing or killed is said, not loaded."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron.core import checkpoint as package
from megatron.core import comm
from megatron.core.boxes import intersect, slices, whole
from megatron.core.checkpoint import CheckpointError, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.checkpoint import format as disk
from megatron.core.checkpoint import save as saving
from megatron.core.config import ConfigError
from megatron.core.grid import Axis, Grid
from megatron.core.placement import Constant, Placement, is_counted, pieces
from megatron.training.arguments import parse_args
from megatron.training.checkpoint_checks import check_same_positions

ALONE = Axis("world", (0,), 0)
DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
FILLER = 1  # what padding holds before a load, and after it


# ---------------------------------------------------------------- ranks as threads


class ThreadGroup:
    """The two calls that saving and loading make, between threads that take turns at a barrier."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def _meet(self, x):
        self.slots[self.rank] = x.clone()
        self.barrier.wait(timeout=5)
        gathered = list(self.slots)
        self.barrier.wait(timeout=5)
        return gathered

    def all_reduce(self, x, op):
        stacked = torch.stack(self._meet(x))
        x.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return self

    def broadcast(self, x, source):
        x.copy_(self._meet(x)[source])
        return self

    def wait(self): ...


def run_ranks(size, work):
    """`work(world)` on every rank; the results, with an exception as the result of the rank that raised it."""
    slots, barrier, results = [None] * size, threading.Barrier(size), [None] * size

    def run(rank):
        world = Axis("world", tuple(range(size)), rank, ThreadGroup(rank, slots, barrier), comm.Ledger())
        try:
            results[rank] = work(world)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


def good(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


# ---------------------------------------------------------------- a model and its layouts


def random_bits(shape, dtype, seed):
    """Every bit pattern is fair: subnormal numbers, infinities and the payloads of NaNs."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=draw).bool()
    size = torch.Size(shape).numel() * disk.ITEM_BYTES[dtype]
    return torch.randint(0, 256, (size,), generator=draw).byte().view(getattr(torch, dtype)).view(shape)


def placed(shape, **options):
    return Placement(shape, Constant(0), **options)


# name -> (dtype, placement, padded extent of dimension 0)
MODEL = {f"square.{dtype}": (dtype, placed((12, 18), shard={"tp": 0, "dp": 1}), None) for dtype in DTYPES} | {
    "gate_up": ("float32", placed((24, 5), shard={"tp": 0}, blocks=(12, 12), replicated_over=("dp",)), None),
    "row": ("bfloat16", placed((4, 12), shard={"tp": 1}, replicated_over=("dp",)), None),
    "vocabulary": ("float32", placed((5, 3), shard={"tp": 0}, replicated_over=("dp",)), 12),  # ranks of padding only
    "norm": ("float32", placed((7,), replicated_over=("tp", "dp")), None),
    "step": ("int64", placed((), replicated_over=("tp", "dp")), None),
    "nothing": ("float32", placed((0, 4), replicated_over=("tp", "dp")), None),
}
WHOLE = {name: random_bits(p.shape, dtype, seed) for seed, (name, (dtype, p, _)) in enumerate(MODEL.items())}


def locals_of(layout, rank, fill):
    """What `rank` of a grid holds of the model: the true values if `fill`, else nothing but filler."""
    mesh = {name: Axis(name, tuple(range(layout[name])), at) for name, at in Grid(layout).coordinates(rank).items()}
    return {name: local_of(name, mesh, fill) for name in MODEL}


def local_of(name, mesh, fill):
    dtype, placement, padded = MODEL[name]
    shape = list(placement.shape)
    shape[:1] = [padded] if padded else shape[:1]
    for axis, dim in placement.shard.items():
        shape[dim] //= mesh[axis].size
    local = torch.full(shape, FILLER, dtype=getattr(torch, dtype))
    pairs = pieces(placement, tuple(shape), mesh)
    for box, inner in pairs if fill else []:
        local[slices(inner)] = WHOLE[name][slices(box)]
    return LocalTensor(local, placement.shape, pairs, is_counted(placement, mesh))


def same_bits(a, b):
    return a.dtype == b.dtype and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def save_layout(root, layout, iteration=7):
    def work(world):
        return save_checkpoint(root, iteration, locals_of(layout, world.rank, fill=True), {}, world)

    return run_ranks(Grid(layout).world_size, work)


def load_layout(root, layout):
    def work(world):
        tensors = locals_of(layout, world.rank, fill=False)
        open_checkpoint(root, world=world).read_into(tensors, world)
        return tensors

    return run_ranks(Grid(layout).world_size, work)


def refused(said):
    return pytest.raises(CheckpointError, match=said)


def one(tensor):
    """A tensor that one rank holds whole."""
    return LocalTensor(tensor, tuple(tensor.shape), [(whole(tensor.shape), whole(tensor.shape))], True)


def save_one(root, iteration=1, state=None, **tensors):
    tensors = tensors or {"w": torch.arange(12.0).view(3, 4)}
    return save_checkpoint(root, iteration, {name: one(x) for name, x in tensors.items()}, state or {}, ALONE)


def loaded(root, iteration=None, name="w", shape=(3, 4)):
    target = one(torch.zeros(shape))
    open_checkpoint(root, iteration).read_into({name: target})
    return target.tensor


# ---------------------------------------------------------------- any layout to any other


@pytest.mark.parametrize("written", [(1, 1), (2, 2), (1, 3)])
def test_every_layout_loads_what_another_saved(tmp_path, written):
    good(save_layout(tmp_path, {"dp": written[0], "tp": written[1]}))
    for layout in ({"dp": dp, "tp": tp} for dp, tp in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (1, 4))):
        for rank, tensors in enumerate(good(load_layout(tmp_path, layout))):
            wanted = locals_of(layout, rank, fill=True)
            wrong = [name for name in MODEL if not same_bits(tensors[name].tensor, wanted[name].tensor)]
            assert not wrong, (layout, rank)


def test_a_folder_holds_one_manifest_and_a_file_per_rank_that_writes(tmp_path):
    (folder, *_) = good(save_layout(tmp_path, {"dp": 2, "tp": 2}))
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json"] + [f"rank_0000{r}.bin" for r in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000007", disk.LATEST]
    records = open_checkpoint(tmp_path).manifest.tensors
    assert len(records["gate_up"].pieces) == 4 and len(records["vocabulary"].pieces) == 1
    assert all(piece.offset % 64 == 0 for record in records.values() for piece in record.pieces)


def test_padding_is_neither_saved_nor_touched(tmp_path):
    good(save_layout(tmp_path, {"dp": 1, "tp": 1}))
    local = locals_of({"dp": 1, "tp": 1}, 0, fill=False)["vocabulary"]
    open_checkpoint(tmp_path).read_into({"vocabulary": local})
    assert same_bits(local.tensor[:5], WHOLE["vocabulary"]) and local.tensor[5:].eq(FILLER).all()
    assert open_checkpoint(tmp_path).manifest.tensors["vocabulary"].shape == (5, 3)


def test_flat_shards_need_no_reshaping(tmp_path):
    full = torch.randn(3, 4)
    first = [(((0, 1), (0, 2)), ((0, 2),))]
    middle = [(((0, 1), (2, 4)), ((0, 2),)), (((1, 2), (0, 4)), ((2, 6),)), (((2, 3), (0, 1)), ((6, 7),))]
    last = [(((2, 3), (1, 4)), ((0, 3),))]
    flat, cuts = full.view(-1), [(0, 2, first), (2, 9, middle), (9, 12, last)]

    def shard(values, rank):
        start, stop, pairs = cuts[rank]
        return {"w": LocalTensor(values[start:stop], (3, 4), pairs, True)}

    good(run_ranks(3, lambda world: save_checkpoint(tmp_path, 1, shard(flat, world.rank), {}, world)))
    assert loaded(tmp_path).equal(full)
    back = torch.zeros(12)
    for rank in range(3):
        open_checkpoint(tmp_path).read_into(shard(back, rank))
    assert back.equal(flat)


def test_large_and_strided_tensors_stream_in_small_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_CHUNK", 64)
    x = torch.randn(5, 100, 3)
    assert max(chunk.nbytes for chunk in saving._chunks(x.transpose(0, 1))) <= 64
    save_one(tmp_path, w=x.transpose(0, 1), v=torch.nn.Parameter(x)[:, ::2])
    assert loaded(tmp_path, shape=(100, 5, 3)).equal(x.transpose(0, 1))
    assert loaded(tmp_path, name="v", shape=(5, 50, 3)).equal(x[:, ::2])


def test_weights_change_dtype_only_when_allowed(tmp_path):
    x = torch.tensor([1.0, 2.5, float("inf"), -0.0])
    save_one(tmp_path, w=x, n=torch.arange(3))
    target = {"w": one(torch.zeros(4, dtype=torch.bfloat16))}
    with refused(r"'w' in float32, the model's is bfloat16; convert=True allows it"):
        open_checkpoint(tmp_path).read_into(target)
    open_checkpoint(tmp_path).read_into(target, convert=True)
    assert target["w"].tensor.equal(x.bfloat16())
    with refused(r"'n' in int64, the model's is float32; load it with the settings of the model that was saved"):
        open_checkpoint(tmp_path).read_into({"n": one(torch.zeros(3))}, convert=True)


def test_each_piece_is_read_once(tmp_path, monkeypatch):
    good(save_layout(tmp_path, {"dp": 2, "tp": 2}))
    reads = []
    checkpoint = open_checkpoint(tmp_path)
    read = type(checkpoint)._read
    monkeypatch.setattr(type(checkpoint), "_read", lambda self, p, *a: (reads.append(p), read(self, p, *a)))
    checkpoint.read_into(locals_of({"dp": 1, "tp": 1}, 0, fill=False))
    assert len(reads) == len(set(reads)) == sum(len(r.pieces) for r in checkpoint.manifest.tensors.values())


# ---------------------------------------------------------------- the state


def test_state_comes_back_exactly(tmp_path):
    state = {
        "lr": 0.1 + 0.2,
        "floats": [5e-324, 1.7976931348623157e308, -0.0, 1 / 3, 2.0**-1074],
        "big": 2**80,
        "text": 'ü "\\\n\ud800',
        "nested": {"": [None, True, {}]},
    }
    save_one(tmp_path, state=state)
    back = open_checkpoint(tmp_path).state
    assert back == state and repr(back) == repr(state)


STATES = [
    ({"loss": float("nan")}, r"state\['loss'\] is nan \(float\), which plain JSON cannot hold"),
    ({"a": [1, (2, 3)]}, r"state\['a'\]\[1\] is \(2, 3\) \(tuple\)"),
    ({"a": {3: 4}}, r"state\['a'\] has the key 3; keys are text in JSON"),
    ({"a": torch.ones(1)}, r"\(Tensor\), which plain JSON cannot hold"),
    ([1], r"state is a list; it must be a dict"),
]


@pytest.mark.parametrize("state, said", STATES)
def test_state_that_json_would_change_is_refused(tmp_path, state, said):
    with refused(said + r"[\s\S]*; nothing was written; the checkpoint before is intact"):
        save_checkpoint(tmp_path, 1, {}, state, ALONE)


# ---------------------------------------------------------------- what cannot be saved


def test_tensors_that_cannot_be_saved_are_all_named(tmp_path):
    box = ((0, 2),)
    tensors = {
        "complex": one(torch.zeros(2, dtype=torch.complex64)),
        "sparse": LocalTensor(torch.zeros(2).to_sparse(), (2,), [], True),
        "outside": LocalTensor(torch.zeros(2), (1,), [(box, box)], True),
        "unequal": LocalTensor(torch.zeros(2, 2), (2, 2), [(((0, 1), (0, 2)), ((0, 2), (0, 1)))], True),
        3: one(torch.zeros(1)),
    }
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, -1, tensors, {}, ALONE)
    for said in (
        "'complex' has dtype complex64; a checkpoint holds float64, float32",
        "'sparse' is torch.sparse_coo; a checkpoint holds dense tensors",
        "[0:2] <- [0:2] do not lie within the whole shape (1,) and the local shape (2,)",
        "box [0:1, 0:2] cannot be taken from box [0:2, 0:1]",
        "a tensor is named 3; names are text",
        "iteration is -1; it must be an integer from 0 up",
    ):
        assert said in str(error.value)
    assert not any(tmp_path.iterdir())


def halves(a, b, other_shape=(4,)):
    """Two ranks that each save a part of `w`, the boxes being `a` and `b`."""

    def work(world):
        span, shape = [(a, (4,)), (b, other_shape)][world.rank]
        held = [((span,), ((0, span[1] - span[0]),))] if span else []
        return save_checkpoint(work.root, 1, {"w": LocalTensor(torch.ones(4), shape, held, True)}, {}, world)

    return work


CLASHES = [
    (halves((0, 3), (2, 4)), r"'w' has pieces that overlap: \[0:3\] in rank_00000.bin and \[2:4\] in rank_00001.bin"),
    (halves((0, 1), (2, 4)), r"'w' of shape \(4,\) has gaps: its boxes \(\[0:1\], \[2:4\]\) hold 3 of 4 elements"),
    (halves((), ()), r"'w' of shape \(4,\) has gaps: its boxes \(none\) hold 0 of 4"),
    (halves((0, 2), (2, 4), (5,)), r"has tensor 'w' as float32 \(5,\), an earlier rank as float32 \(4,\); two differ"),
]  # fmt: skip


@pytest.mark.parametrize("work, said", CLASHES)
def test_overlaps_and_gaps_between_ranks_are_refused(tmp_path, work, said):
    work.root = tmp_path
    save_one(tmp_path, 0)
    first, second = run_ranks(2, work)
    for error, kind in ((first, CheckpointError), (second, comm.PeerError)):
        assert isinstance(error, kind)
        with pytest.raises(kind, match=said + r"[\s\S]*the checkpoint before is intact"):
            raise error
    assert open_checkpoint(tmp_path).iteration == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000000", disk.LATEST]


def test_a_tensor_that_no_rank_writes_is_noticed(tmp_path):
    def work(world):
        box = [(((0, 2),), ((0, 2),))]
        mine = {"a": LocalTensor(torch.ones(2), (2,), box, world.is_first)}
        mine |= {} if world.is_first else {"lost": LocalTensor(torch.ones(2), (2,), box, False)}
        mine |= {} if world.is_first else {"a": LocalTensor(torch.ones(2, dtype=torch.int32), (2,), box, False)}
        return save_checkpoint(tmp_path, 1, mine, {}, world)

    first, second = run_ranks(2, work)
    assert isinstance(first, comm.PeerError) and isinstance(second, CheckpointError)
    assert "tensor 'lost', float32 (2,), has no rank that writes it" in str(second)
    assert "tensor 'a', int32 (2,), was saved as float32 (2,)" in str(first)
    assert not any(tmp_path.iterdir())


def test_a_folder_that_ranks_do_not_share_is_noticed(tmp_path):
    def work(world):  # each rank has a disk of its own
        return save_checkpoint(tmp_path / str(world.rank), 1, {"w": one(torch.ones(2))}, {}, world)

    first, second = run_ranks(2, work)
    assert isinstance(first, comm.PeerError)
    assert "was made by the first rank but is not visible to rank 1" in str(second)
    assert "file system that all ranks share; choose another --save" in str(first)


@pytest.mark.parametrize("suffix", [".bin", ".json"])
@pytest.mark.parametrize("left, said", [(None, "is not there"), (b"ab", "has 2 bytes")])
def test_a_part_that_rank_0_does_not_see_is_noticed(tmp_path, monkeypatch, left, said, suffix):
    write = saving._write_part

    def write_and_lose(partial, iteration, rank, tensors):
        result = write(partial, iteration, rank, tensors)
        if rank == 1:
            (partial / f"rank_00001{suffix}").unlink()
        if rank == 1 and left:
            (partial / f"rank_00001{suffix}").write_bytes(left)
        return result

    monkeypatch.setattr(saving, "_write_part", write_and_lose)
    with refused(rf"rank_00001{suffix}: {said}, though its rank wrote \d+ bytes; the folder must be on a file system"):
        good(save_layout(tmp_path, {"dp": 2, "tp": 1}))


# ---------------------------------------------------------------- killed or failed half-way


class Killed(BaseException):
    """The process ends here: nothing that catches an Exception runs."""


def raise_at(call, error, function):
    """`function`, except that its call number `call` raises `error`."""
    numbers = iter(range(1, 1000))

    def wrapped(*args, **options):
        if next(numbers) == call:
            raise error
        return function(*args, **options)

    return wrapped


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
@pytest.mark.parametrize("iteration", [1, 2], ids=["same iteration", "new iteration"])
@pytest.mark.parametrize(
    "owner, name, call",
    [(saving, "_write_piece", 2), (Path, "mkdir", 2), (Path, "rename", 1), (os, "replace", 1), (Path, "rename", 2)]
    + [(os, "fsync", call) for call in (1, 2, 4, 7)],  # 3, 5 and 6 sync folders, which is not possible everywhere
)
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, owner, name, call, iteration, error
):
    old, new = torch.zeros(3, 4), torch.ones(3, 4)
    save_one(tmp_path, 1, w=old, v=old)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raise_at(call, error, getattr(owner, name)))
        if (name, call, iteration) == ("rename", 2, 2):  # there is no second one: nothing had to be set aside
            save_one(tmp_path, 2, w=new, v=new)
            return
        with pytest.raises((Killed, CheckpointError)) as raised:
            save_one(tmp_path, iteration, w=new, v=new)
    assert raised.type is Killed or "cannot be written ([Errno 28] No space left on device); free" in str(raised.value)
    is_in_place = name == "replace" or call == 7  # all but `latest` is done
    expected = new if iteration == 1 and is_in_place else old
    assert open_checkpoint(tmp_path).iteration == 1
    assert loaded(tmp_path).equal(expected) and loaded(tmp_path, name="v").equal(expected)
    save_one(tmp_path, 2, w=new, v=new)
    assert loaded(tmp_path).equal(new) and loaded(tmp_path, 1).equal(expected)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001", "iter_0000002", disk.LATEST}


def test_a_failing_rank_stops_all_with_its_message(tmp_path, monkeypatch):
    good(save_layout(tmp_path, {"dp": 2, "tp": 2}, 1))
    write = saving._write_pieces

    def fail(path, tensors):
        if path.name == "rank_00002.bin":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(saving, "_write_pieces", fail)
    results = save_layout(tmp_path, {"dp": 2, "tp": 2}, 2)
    assert [type(result) for result in results] == [comm.PeerError, comm.PeerError, CheckpointError, comm.PeerError]
    for result in results:
        assert "rank_00002.bin: cannot be written ([Errno 28] No space left on device)" in str(result)
    assert "rank 2: " in str(results[0])
    assert open_checkpoint(tmp_path).iteration == 1 and not (tmp_path / "iter_0000002.partial").exists()
    monkeypatch.undo()
    good(save_layout(tmp_path, {"dp": 2, "tp": 2}, 2))
    assert open_checkpoint(tmp_path).iteration == 2


def test_a_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    with refused(r"exists and has no manifest.json, so it is not ours to replace; move it"):
        save_one(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


# ---------------------------------------------------------------- what cannot be loaded


def test_missing_folders_and_iterations_are_named(tmp_path):
    with refused(r"none: is not a folder; give --load the folder that holds latest_check"):
        open_checkpoint(tmp_path / "none")
    with refused(r"holds no latest_\S+, so no checkpoint was finished in it; no iteration"):
        open_checkpoint(tmp_path)
    save_one(tmp_path, 3)
    save_one(tmp_path, 12)
    with refused(r"iter_0000004: does not exist; name one of the .* are there: 3, 12$"):
        open_checkpoint(tmp_path, 4)
    assert open_checkpoint(tmp_path, 3).iteration == 3
    (tmp_path / disk.LATEST).write_text("release\n")
    with refused(r"says 'release', not the number of an iteration; name one .* 3, 12$"):
        open_checkpoint(tmp_path)
    (tmp_path / "iter_0000012" / disk.MANIFEST).unlink()
    with refused(r"iter_0000012: has no manifest.json; if it is of another format, convert"):
        open_checkpoint(tmp_path, 12)
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000005")
    with refused(r"iter_0000005: holds iteration 3; give the folder its old name back"):
        open_checkpoint(tmp_path, 5)


def test_all_that_does_not_fit_is_in_one_error(tmp_path):
    save_one(tmp_path, w=torch.ones(2), v=torch.ones(3))
    wanted = {"w": one(torch.ones(3)), "x": one(torch.ones(1)), "y": one(torch.ones(1)), "v": one(torch.zeros(3))}
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path).read_into(wanted)
    for said in ("has no tensor 'x'", "has no tensor 'y'", "has tensor 'w' of shape (2,), the model's is (3,)"):
        assert said in str(error.value)
    assert wanted["v"].tensor.eq(0).all()
    many = {f"m{i}": one(torch.ones(1)) for i in range(30)}
    with refused(r"has no tensor 'm9'\n  and 20 more\n"):
        open_checkpoint(tmp_path).read_into(many)
    assert open_checkpoint(tmp_path).names == ["w", "v"]


def test_one_flipped_bit_is_refused_before_it_is_used(tmp_path):
    folder = save_one(tmp_path, w=torch.ones(3, 4), v=torch.ones(5))
    data = bytearray((folder / "rank_00000.bin").read_bytes())
    data[70] ^= 1
    (folder / "rank_00000.bin").write_bytes(data)
    assert loaded(tmp_path).eq(1).all()
    target = one(torch.zeros(5))
    with refused(r"rank_00000.bin: does not match the sha256 of tensor 'v', box \[0:5\]; the"):
        open_checkpoint(tmp_path).read_into({"v": target})
    assert target.tensor.eq(0).all()


def test_a_damaged_piece_on_one_rank_stops_all(tmp_path):
    (folder, *_) = good(save_layout(tmp_path, {"dp": 1, "tp": 2}))
    data = bytearray((folder / "rank_00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "rank_00001.bin").write_bytes(data)
    first, second = load_layout(tmp_path, {"dp": 1, "tp": 2})
    assert isinstance(first, comm.PeerError) and isinstance(second, CheckpointError)
    assert "rank_00001.bin: does not match the sha256 of tensor 'square.float64'" in str(first)


def test_shortened_and_missing_files_are_refused(tmp_path):
    folder = save_one(tmp_path, w=torch.ones(3, 4))
    file, checkpoint = folder / "rank_00000.bin", open_checkpoint(tmp_path)
    file.write_bytes(file.read_bytes()[:40])
    with refused(r"iter_0000001: rank_00000.bin has 40 bytes, not 48; the checkpoint is dam"):
        open_checkpoint(tmp_path)
    with refused(r"rank_00000.bin: ends before the last 8 bytes of tensor 'w', box"):
        checkpoint.read_into({"w": one(torch.zeros(3, 4))})
    file.unlink()
    with refused(r"iter_0000001: rank_00000.bin is missing; the checkpoint is damaged"):
        open_checkpoint(tmp_path)
    with refused(r"cannot be read \(\[Errno 2\].*for tensor 'w'.*; every rank must see the"):
        checkpoint.read_into({"w": one(torch.zeros(3, 4))})


# ---------------------------------------------------------------- a manifest that is not what was written


def sealed(raw):
    """The text of an edited manifest whose hash is right again: what lies beyond the hash must be checked too."""
    body = json.dumps({key: value for key, value in raw.items() if key != "sha256"})[:-1]
    return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}\n'


def edited(*keys, value):
    def edit(raw):
        at = raw
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        return raw

    return edit


def two_pieces(*boxes):
    def edit(raw):
        piece = raw["tensors"]["w"]["pieces"][0]
        volume = [(b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) for b in boxes]
        raw["tensors"]["w"]["pieces"] = [piece | {"box": b, "nbytes": 4 * n} for b, n in zip(boxes, volume)]
        return raw

    return edit


W, P = ("tensors", "w"), ("tensors", "w", "pieces", 0)
EDITS = [
    (edited("format", value="other"), r"has format 'other', not 'megatron-boxes'; convert it"),
    (edited("version", value=2), r"has version 2; this code reads 1; load it with the release that wrote it"),
    (edited("byte_order", value="big"), r"holds 'big'-endian numbers, this machine's are little-endian; load it on"),
    (edited("iteration", value=-4), r"the manifest has a negative 'iteration': -4"),
    (edited("iteration", value=True), r"the manifest has no 'iteration' of type int"),
    (edited("state", value=[]), r"the manifest has no 'state' of type dict"),
    (edited("files", value={"rank_00000.bin": "48"}), r"files has no 'rank_00000.bin' of type int"),
    (edited("files", value={"../rank_00000.bin": 48}), r"names the file '../rank_00000.bin'; a file name is made of"),
    (edited("files", value={"/etc/passwd": 48}), r"names the file '/etc/passwd'; a file name"),
    (edited("files", value={"a..b": 48}), r"names the file 'a..b'; .* has no '..' and no folder"),
    (edited(*P, "file", value="../../x"), r"box \[0:3, 0:4\] ends at byte 48 of '../../x', which is not listed"),
    (edited(*P, "offset", value=1), r"ends at byte 49 of 'rank_00000.bin', which has 48; the checkpoint is damaged"),
    (edited(*P, "offset", value=-64), r"tensor 'w' has a negative 'offset': -64"),
    (edited(*P, "nbytes", value=44), r"box \[0:3, 0:4\] cannot have 44 bytes of float32"),
    (edited(*P, "sha256", value="xyz"), r"has 'xyz' where a sha256 in hexadecimal belongs"),
    (edited(*P, "box", value=[[0, 3], [0, 5]]), r"box \[0:3, 0:5\] is not a box within shape \(3, 4\)"),
    (edited(*P, "box", value=[[0, 3]]), r"box \[0:3\] is not a box within shape \(3, 4\)"),
    (edited(*P, "box", value=[[0, 3], [4]]), r"tensor 'w', box: \[4\] is not a list of 2 integers from 0 up"),
    (edited(*W, "dtype", value="object"), r"tensor 'w' has dtype 'object'; allowed are float64, float32, bfloat16"),
    (edited(*W, "shape", value=[3, -4]), r"tensor 'w', shape: \[3, -4\] is not a list of integers from 0 up"),
    (edited(*W, "pieces", value=[3]), r"tensor 'w' has no 'box' of type list"),
    (edited(*W, "pieces", value=[]), r"'w' of shape \(3, 4\) has gaps: its boxes \(none\) hold 0 of 12 elements"),
    (two_pieces([[0, 2], [0, 4]], [[1, 3], [0, 4]]), r"overlap: \[0:2, 0:4\] in rank_00000.bin and \[1:3, 0:4\] in"),
    (two_pieces([[0, 3], [0, 2]], [[0, 3], [1, 3]]), r"'w' has pieces that overlap: \[0:3, 0:2\]"),
    (two_pieces([[0, 2], [0, 4]], [[2, 3], [0, 3]]), r"has gaps: its boxes \(.*\) hold 11 of 12 elements; the check"),
]  # fmt: skip


@pytest.mark.parametrize("edit, said", EDITS, ids=range(len(EDITS)))
def test_every_value_of_a_manifest_is_checked(tmp_path, edit, said):
    path = save_one(tmp_path) / disk.MANIFEST
    path.write_text(sealed(edit(json.loads(path.read_text()))))
    with refused(r"manifest.json:[\s\S]*" + said):
        open_checkpoint(tmp_path)


DAMAGES = [
    (lambda text: text[: len(text) // 2], r"is not JSON from beginning to end \("),
    (lambda text: "[]", r"has format None, not 'megatron-boxes'"),
    (lambda text: "[" * 100000, r"is not JSON from beginning to end"),
    (lambda text: text.replace(": 0.25", ": 0.26"), r"does not match the sha256 in its last line; the checkpoint is"),
    (lambda text: text.replace(": 0.25", ": NaN"), r"is not JSON .*\(NaN is not JSON\)"),
    (lambda text: text.replace('{"lr"', '{"lr": 1, "lr"'), r"is not JSON .*\(an object names one key twice\)"),
    (lambda text: text.replace('"lr"', '"\udcff"'), r"cannot be read \('utf-8' codec can't decode"),
]


@pytest.mark.parametrize("change, said", DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_manifest_is_refused(tmp_path, change, said):
    path = save_one(tmp_path, state={"lr": 0.25}) / disk.MANIFEST
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with refused(r"manifest.json: " + said):
        open_checkpoint(tmp_path)


def test_no_byte_of_a_manifest_can_change(tmp_path):
    text = (save_one(tmp_path, state={"lr": 0.25}) / disk.MANIFEST).read_text()
    assert disk.parse_manifest(text, "m") == open_checkpoint(tmp_path).manifest
    for at in range(len(text)):
        for other in (text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :], text[:at], text[:at] + text[at + 1 :]):
            with refused(r"^m: "):
                disk.parse_manifest(other, "m")


def test_the_sweep_finds_what_all_pairs_find():
    spans = [(0, 2), (1, 3), (2, 4)]
    boxes = list(product(spans, spans))
    for pair in [*product(boxes, boxes), ((), ())]:  # the last: one number, twice
        pieces = tuple(disk.Piece(box, "", 0, 0, "") for box in pair)
        assert bool(disk._first_overlap(pieces)) == (intersect(*pair) is not None), pair


def test_format_is_read_without_torch():
    code = "import sys, megatron.core.checkpoint.format as f; f.folder_name(1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert "save_checkpoint" in dir(package) and all(hasattr(package, name) for name in dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'pickle'"):
        package.pickle  # noqa: B018


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 4", "6 learned positions, this run 4 (--seq-length); --max-position-embeddings 6 keeps the saved table"),
        ("--seq-length 4 --max-position-embeddings 5", "this run 5 (--max-position-embeddings); --max-position-embeddings 6 keeps"),
        ("--seq-length 8", "keeps the saved table with --seq-length 6 or less, which is now 8"),
        ("--seq-length 6", None),
        ("--seq-length 4 --max-position-embeddings 6", None),
    ],
)  # fmt: skip
def test_other_learned_positions_are_refused_by_their_flag(flags: str, said: str | None, tmp_path):
    config, _, _ = parse_args(flags.split())
    name, device, everything = "model/embedding.position_embeddings.weight", torch.device("cpu"), {}
    for rows in (6, config.positions):
        box = whole((rows, 2))
        everything[rows] = {name: LocalTensor(torch.ones(rows, 2), (rows, 2), [(box, box)], True)}
    saved, mine = everything[6], everything[config.positions]
    save_checkpoint(tmp_path, 1, saved, {}, ALONE)
    refused = pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext()
    with refused:
        check_same_positions(config, mine, open_checkpoint(tmp_path), ALONE, device)
