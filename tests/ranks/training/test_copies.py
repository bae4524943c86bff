"""--non-persistent-save-interval: the same command goes on from a copy to the same bits, or without it from the checkpoint before.

A run's ranks are threads; what it prints and ends in is compared with the run that nothing happened to.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from failing_files import Killed, failing
from said import tells
from stopped_runs import ended, job, lines

RUN = "--train-iters 6 --save-interval 4 --save {root} --load {root} --non-persistent-save-interval 1 --num-layers 2 "
LOCAL = "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {root}/../disk "
GLOBAL = "--non-persistent-ckpt-type global --non-persistent-global-ckpt-dir {root}/../shared "
DP = (("dp", 2),)
PP = (("pp", 2),)
LAYOUTS = {
    "local, ZeRO 1, bf16": (LOCAL + "--use-distributed-optimizer --bf16 --global-batch-size 2 ", DP),
    "local, ZeRO 3, offload": (LOCAL + "--zero-stage 3 --offload-dir /tmp/copies-offload --global-batch-size 2 ", DP),
    "local, PP 2, dropout": (
        LOCAL + "--pipeline-model-parallel-size 2 --hidden-dropout 0.1 --global-batch-size 2 ",
        PP,
    ),
    "local, TP 2, async": (LOCAL + "--tensor-model-parallel-size 2 --async-save ", (("tp", 2),)),
    "global, ZeRO 2, fp16": (GLOBAL + "--zero-stage 2 --fp16 --initial-loss-scale 16 --global-batch-size 2 ", DP),
}
FAST = "local, ZeRO 1, bf16"
# The rest of the command takes one more; the others are for -m sweep.
NAMES = [
    pytest.param(name, marks=[] if name == FAST else pytest.mark.full if "TP 2" in name else pytest.mark.sweep)
    for name in LAYOUTS
]


def run(name: str, root: Path, more: str = "") -> str:
    flags, sizes = LAYOUTS[name]
    return job((RUN + flags).format(root=root) + more, **dict(sizes))


@cache
def whole(name: str) -> tuple[dict[str, str], dict[str, object]]:
    """(the lines, what it ends in) of the run that nothing happened to."""
    root = Path(mkdtemp(prefix="copies-")) / "root"
    return lines(run(name, root)), ended(root)


def pointer(root: Path) -> dict:
    return json.loads((root / "non_persistent.json").read_text())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def stop(name: str, root: Path, copies: int) -> None:
    """A machine goes down when this many copies have come to count."""
    is_pointer = lambda call: call.kind == "rename" and "non_persistent.json" in call.name  # noqa: E731
    with failing(copies, "killed after", only=is_pointer) as calls, pytest.raises(RuntimeError) as error:
        run(name, root)
    assert calls.hit
    assert isinstance(error.value.__cause__, Killed)


def goes_on(name: str, root: Path, began_after: int) -> str:
    """The same command; it must end as the run that nothing happened to."""
    expected, last = whole(name)
    said = run(name, root)
    mine = lines(said)
    assert list(mine) == [str(number) for number in range(began_after + 1, 7)], list(mine)
    assert mine == {number: expected[number] for number in mine}
    end = ended(root)
    if "async" in name:  # the checkpoint that was in flight as the run died is older than the copy, and is never saved
        assert set(last["names"]) - set(end["names"]) <= {"iter_0000004"}
        last = last | {"names": end["names"]}
    assert end == last
    return said


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_same_command_goes_on_from_the_copy_to_the_same_bits(name: str, root: Path):
    """Killed once before the first checkpoint, once after it; copies follow iterations 1, 2, 3, 5, 6."""
    stop(name, root, 2)
    assert pointer(root)["iteration"] == 2 and not list(root.glob("iter_*"))
    stop(name, root, 2)  # 3 and, after the checkpoint of 4, 5
    there = [path.name.removesuffix(".partial" * ("async" in name)) for path in root.glob("iter_*")]
    assert pointer(root)["iteration"] == 5 and there == [
        "iter_0000004"
    ]  # perhaps not yet, where it is saved beside training
    said = goes_on(name, root, 5)
    assert "WARNING" not in said and "loaded checkpoint of iteration 5" in said


def slots(root: Path) -> list[Path]:
    return sorted(root.parent.glob("disk/*/rank_*/slot_*"))


def copies(root: Path) -> list[Path]:
    """The copy that counts, of each rank."""
    return sorted(root.parent.glob(f"disk/*/rank_*/{pointer(root)['slot']}/iter_*"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


HARM = {
    "a flipped bit on one rank": lambda parts, root: flip(parts[1] / "rank_00000.bin"),
    "a machine is replaced": lambda parts, root: shutil.rmtree(parts[1].parents[1]),
    "a manifest": lambda parts, root: flip(parts[0] / "manifest.json"),
    "of another save": lambda parts, root: (root / "non_persistent.json").write_text(
        json.dumps(pointer(root) | {"token": "0" * 32})
    ),
    "the pointer": lambda parts, root: (root / "non_persistent.json").write_text('{"iteration": 5'),
}


@pytest.mark.parametrize(
    "harm", [pytest.param(harm, marks=pytest.mark.full if "machine" in harm else pytest.mark.sweep) for harm in HARM]
)
def test_a_damaged_or_partly_lost_copy_gives_way_to_the_checkpoint_on_all_ranks(harm: str, root: Path):
    stop(FAST, root, 4)
    parts = copies(root)
    assert len(parts) == 2 and all(part.name == "iter_0000005" for part in parts), parts
    HARM[harm](parts, root)
    said = goes_on(FAST, root, 4)
    assert harm == "the pointer" or tells(said, "WARNING: copy 5 4"), said


@pytest.mark.full
def test_without_a_checkpoint_a_lost_copy_starts_anew_and_a_damaged_one_is_refused(root: Path):
    stop(FAST, root, 2)
    flip(copies(root)[1] / "rank_00000.bin")
    with pytest.raises(RuntimeError) as error:
        run(FAST, root)
    assert tells(error.value.__cause__, "iteration 2 non_persistent.json"), error.value.__cause__
    shutil.rmtree(copies(root)[1])
    assert tells(goes_on(FAST, root, 0), "WARNING: copy initial weights")


@pytest.mark.sweep
def test_only_the_newest_copy_is_kept_and_another_folder_has_no_part_in_it(root: Path):
    run(FAST, root)
    assert [part.name for part in copies(root)] == ["iter_0000005"] * 2 and len(slots(root)) == 2
    other = root.with_name("other")
    assert next(iter(lines(run(FAST, other)))) == "1"  # the same disk, another --save
    shutil.rmtree(root)
    assert next(iter(lines(run(FAST, root)))) == "1"  # started anew on purpose: the copies are of a run that is gone


@pytest.mark.sweep
def test_another_layout_goes_on_from_the_checkpoint(root: Path):
    stop(FAST, root, 4)
    flags, _ = LAYOUTS[FAST]
    said = job((RUN + flags).format(root=root))
    assert list(lines(said)) == ["5", "6"] and "WARNING" in said


KINDS = ("open", "write", "sync", "rename", "sync_folder", "remove", "remove_folder", "make_folder")
FEW = (("rename", "killed"), ("write", "EIO"))
FAULTS = [
    pytest.param(kind, how, marks=pytest.mark.full if (kind, how) in FEW else pytest.mark.sweep)
    for kind in KINDS
    for how in ("killed", "killed alone", "EIO", "ENOSPC")
]


@pytest.mark.parametrize("kind, how", FAULTS)
def test_a_fault_in_the_third_copy_loses_nothing(kind: str, how: str, root: Path):
    """The first call of this kind in the slot of the third copy, or on the pointer, on the second rank or the first."""
    is_alone = how.endswith("alone")
    seen = []

    def only(call) -> bool:
        if call.kind == "rename" and call.name.endswith("non_persistent.json.partial"):
            seen.append(call)
        return len(seen) == 2 and call.kind == kind and not call.name.startswith("rb ")

    with failing(1, how.removesuffix(" alone") if is_alone else how, only=only, alone=is_alone) as calls:
        try:
            said = run(FAST, root)
        except RuntimeError as error:
            said = error.said
    assert calls.hit
    if how in ("EIO", "ENOSPC"):
        assert "WARNING: no copy of iteration" in said or kind in ("remove", "remove_folder", "sync_folder")
        assert list(lines(said)) == [str(number) for number in range(1, 7)]
        assert lines(said) == whole(FAST)[0] and ended(root) == whole(FAST)[1]
    else:
        goes_on(FAST, root, pointer(root)["iteration"])


REFUSED = {
    "--non-persistent-save-interval 2": "--non-persistent-save-interval --non-persistent-ckpt-type",
    "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d": "--non-persistent-save-interval",
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type in_memory": "in_memory local /dev/shm/NAME",
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type local": "--non-persistent-local-ckpt-dir",
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type global --no-save-optim": "--no-save-optim",
    "--non-persistent-global-ckpt-dir d": "--non-persistent-global-ckpt-dir --non-persistent-ckpt-type",
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir s3://b/c": "s3://b/c",
    "--non-persistent-local-ckpt-algo fully_parallel": "--non-persistent-local-ckpt-algo fully_parallel",
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /proc/d": "/proc/d",
}


@pytest.mark.full
@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_work_is_refused_by_name(flags: str, refused, tmp_path: Path):
    assert tells(refused(f"--train-iters 4 --save {tmp_path}/root {flags}"), REFUSED[flags]) or "/proc/d" in flags


@pytest.mark.full
def test_copies_need_the_folder_that_names_them(refused):
    assert tells(
        refused("--train-iters 4 --non-persistent-save-interval 2 --non-persistent-ckpt-type global"), "--save"
    )
