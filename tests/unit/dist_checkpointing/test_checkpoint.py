"""What any layout saves, any other loads, to the bit; and what is damaged, missing or killed is said, not loaded."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from said import raises_telling, tells
from small_checkpoints import good, loaded, one, refused, save_one, tried_by_ranks

from megatron.core import dist_checkpointing as package
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import (
    CheckpointError,
    LocalTensor,
    manifest_format as disk,
    open_checkpoint,
    save_checkpoint,
    save_sharded as saving,
    write_and_publish as writing,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis, Grid
from megatron.core.sharding.boxes import slices, whole
from megatron.core.sharding.placement import Constant, Placement, is_counted, pieces
from megatron.training.arguments.command_line import parse_args
from megatron.training.checkpointing.check_same_model_and_optimizer import check_position_table_rows

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
FILLER = 1  # what padding holds before a load, and after it


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

    return tried_by_ranks(Grid(layout).world_size, work)


def load_layout(root, layout):
    def work(world):
        tensors = locals_of(layout, world.rank, fill=False)
        open_checkpoint(root, world=world).read_into(tensors, world)
        return tensors

    return tried_by_ranks(Grid(layout).world_size, work)


# ---------------------------------------------------------------- any layout to any other


@pytest.mark.full
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

    good(tried_by_ranks(3, lambda world: save_checkpoint(tmp_path, 1, shard(flat, world.rank), {}, world)))
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
    with refused("w float32 bfloat16"):
        open_checkpoint(tmp_path).read_into(target)
    open_checkpoint(tmp_path).read_into(target, convert=True)
    assert target["w"].tensor.equal(x.bfloat16())
    with refused("n int64 float32"):
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
    ({"loss": float("nan")}, "state['loss'] nan JSON"),
    ({"a": [1, (2, 3)]}, "state['a'][1] tuple"),
    ({"a": {3: 4}}, "state['a'] 3 JSON"),
    ({"a": torch.ones(1)}, "Tensor JSON"),
    ([1], "list dict"),
]


@pytest.mark.parametrize("state, said", STATES)
def test_state_that_json_would_change_is_refused(tmp_path, state, said):
    with refused(f"{said} {tmp_path}"):
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
    (halves((0, 3), (2, 4)), "w 0:3 rank_00000.bin 2:4 rank_00001.bin"),
    (halves((0, 1), (2, 4)), "w 4 0:1 2:4 3"),
    (halves((), ()), "w 4 0"),
    (halves((0, 2), (2, 4), (5,)), "w float32 5 4"),
]


@pytest.mark.parametrize("work, said", CLASHES)
def test_overlaps_and_gaps_between_ranks_are_refused(tmp_path, work, said):
    work.root = tmp_path
    save_one(tmp_path, 0)
    first, second = tried_by_ranks(2, work)
    for error, kind in ((first, CheckpointError), (second, collectives.PeerError)):
        assert isinstance(error, kind)
        with raises_telling(kind, f"{said} 0"):
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

    first, second = tried_by_ranks(2, work)
    assert isinstance(first, collectives.PeerError) and isinstance(second, CheckpointError)
    assert tells(second, "lost float32 2")
    assert tells(first, "a int32 2 float32")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_ranks_do_not_share_is_noticed(tmp_path):
    def work(world):  # each rank has a disk of its own
        return save_checkpoint(tmp_path / str(world.rank), 1, {"w": one(torch.ones(2))}, {}, world)

    first, second = tried_by_ranks(2, work)
    assert isinstance(first, collectives.PeerError)
    assert "rank 1" in str(second)
    assert tells(first, "--save")


@pytest.mark.parametrize("suffix", [".bin", ".json"])
@pytest.mark.parametrize("left, said", [(None, ""), (b"ab", "2")])
def test_a_part_that_rank_0_does_not_see_is_noticed(tmp_path, monkeypatch, left, said, suffix):
    write = writing._write_own_items

    def write_and_lose(partial, iteration, rank, tensors):
        result = write(partial, iteration, rank, tensors)
        if rank == 1:
            (partial / f"rank_00001{suffix}").unlink()
        if rank == 1 and left:
            (partial / f"rank_00001{suffix}").write_bytes(left)
        return result

    monkeypatch.setattr(writing, "_write_own_items", write_and_lose)
    with refused(f"rank_00001{suffix} {said}"):
        good(save_layout(tmp_path, {"dp": 2, "tp": 1}))


# ---------------------------------------------------------------- killed or failed half-way


def test_a_failing_rank_stops_all_with_its_message(tmp_path, monkeypatch):
    good(save_layout(tmp_path, {"dp": 2, "tp": 2}, 1))
    write = writing._write_pieces

    def fail(path, tensors):
        if path.name == "rank_00002.bin":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(writing, "_write_pieces", fail)
    results = save_layout(tmp_path, {"dp": 2, "tp": 2}, 2)
    assert [type(result) for result in results] == [
        collectives.PeerError,
        collectives.PeerError,
        CheckpointError,
        collectives.PeerError,
    ]
    for result in results:
        assert tells(result, "rank_00002.bin 28")
    assert "rank 2: " in str(results[0])
    assert open_checkpoint(tmp_path).iteration == 1 and not (tmp_path / "iter_0000002.partial").exists()
    monkeypatch.undo()
    good(save_layout(tmp_path, {"dp": 2, "tp": 2}, 2))
    assert open_checkpoint(tmp_path).iteration == 2


def test_a_foreign_folder_is_not_replaced(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    with refused("manifest.json"):
        save_one(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


# ---------------------------------------------------------------- what cannot be loaded


def test_missing_folders_and_iterations_are_named(tmp_path):
    with refused("none --load latest_checkpointed_iteration.txt"):
        open_checkpoint(tmp_path / "none")
    with refused("latest_checkpointed_iteration.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / ("a" * 300))
    save_one(tmp_path, 3)
    save_one(tmp_path, 12)
    with refused("iter_0000004 3 12"):
        open_checkpoint(tmp_path, 4)
    assert open_checkpoint(tmp_path, 3).iteration == 3
    (tmp_path / disk.LATEST).write_text("release\n")
    with refused("release 3 12"):
        open_checkpoint(tmp_path)
    (tmp_path / "iter_0000012" / disk.MANIFEST).unlink()
    with refused("iter_0000012 manifest.json"):
        open_checkpoint(tmp_path, 12)
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000005")
    with refused("iter_0000005 3"):
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
    with refused("m9 20"):
        open_checkpoint(tmp_path).read_into(many)
    assert open_checkpoint(tmp_path).names == ["w", "v"]


def test_one_flipped_bit_is_refused_before_it_is_used(tmp_path):
    folder = save_one(tmp_path, w=torch.ones(3, 4), v=torch.ones(5))
    data = bytearray((folder / "rank_00000.bin").read_bytes())
    data[70] ^= 1
    (folder / "rank_00000.bin").write_bytes(data)
    assert loaded(tmp_path).eq(1).all()
    target = one(torch.zeros(5))
    with refused("rank_00000.bin sha256 v 0:5"):
        open_checkpoint(tmp_path).read_into({"v": target})
    assert target.tensor.eq(0).all()
    with refused("rank_00000.bin sha256 v 0:5"):
        open_checkpoint(tmp_path).read_into({"v": target}, in_place=True)


def test_neither_a_piece_nor_what_aligns_it_can_change(tmp_path):
    """What aligns a piece is zero, and read with it."""
    x = {"u": torch.ones(3), "v": torch.ones(5, dtype=torch.uint8), "w": torch.ones(17)}
    file = save_one(tmp_path, **x) / "rank_00000.bin"
    checkpoint, content = open_checkpoint(tmp_path), file.read_bytes()
    assert len(content) == 64 + 64 + 68
    for at in range(0, len(content), 5):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with refused("rank_00000.bin"):
            checkpoint.read_into({name: one(torch.zeros_like(value)) for name, value in x.items()})


def test_a_damaged_piece_on_one_rank_stops_all(tmp_path):
    (folder, *_) = good(save_layout(tmp_path, {"dp": 1, "tp": 2}))
    data = bytearray((folder / "rank_00001.bin").read_bytes())
    data[0] ^= 1
    (folder / "rank_00001.bin").write_bytes(data)
    first, second = load_layout(tmp_path, {"dp": 1, "tp": 2})
    assert isinstance(first, collectives.PeerError) and isinstance(second, CheckpointError)
    assert tells(first, "rank_00001.bin sha256 square.float64")


def test_shortened_and_missing_files_are_refused(tmp_path):
    folder = save_one(tmp_path, w=torch.ones(3, 4))
    file, checkpoint = folder / "rank_00000.bin", open_checkpoint(tmp_path)
    file.write_bytes(file.read_bytes()[:40])
    with refused("iter_0000001 rank_00000.bin 40 48"):
        open_checkpoint(tmp_path)
    with refused("rank_00000.bin 8 w"):
        checkpoint.read_into({"w": one(torch.zeros(3, 4))})
    file.unlink()
    with refused("iter_0000001 rank_00000.bin"):
        open_checkpoint(tmp_path)
    with refused("Errno 2 w"):
        checkpoint.read_into({"w": one(torch.zeros(3, 4))})


def test_format_is_read_without_torch():
    code = "import sys, megatron.core.dist_checkpointing.manifest_format as f; f.folder_name(1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert "save_checkpoint" in dir(package) and all(hasattr(package, name) for name in dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'pickle'"):
        package.pickle  # noqa: B018


FLAGS_AND_SAID = [
    ("--seq-length 4", "6 4 --seq-length --max-position-embeddings"),
    ("--seq-length 4 --max-position-embeddings 5", "5 --max-position-embeddings 6"),
    ("--seq-length 8", "--seq-length 6 8"),
    ("--seq-length 6", None),
    ("--seq-length 4 --max-position-embeddings 6", None),
]


@pytest.mark.parametrize(("flags", "said"), FLAGS_AND_SAID)
def test_other_learned_positions_are_refused_by_their_flag(flags: str, said: str | None, tmp_path):
    config, _, _ = parse_args(flags.split())
    name, device, everything = "model/embedding.position_embeddings.weight", torch.device("cpu"), {}
    for rows in (6, config.positions):
        box = whole((rows, 2))
        everything[rows] = {name: LocalTensor(torch.ones(rows, 2), (rows, 2), [(box, box)], True)}
    saved, mine = everything[6], everything[config.positions]
    save_checkpoint(tmp_path, 1, saved, {}, ALONE)
    refused = raises_telling(ConfigError, said) if said else contextlib.nullcontext()
    with refused:
        check_position_table_rows(config, mine, open_checkpoint(tmp_path), ALONE, device)
