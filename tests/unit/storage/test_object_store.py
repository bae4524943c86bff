"""Checkpoints in an object store, here fsspec's memory://, where nothing is renamed: the manifest, written last, makes one of objects."""

import builtins
import errno
import json
import os
import re
import threading
import warnings
from dataclasses import replace

import fsspec
import pytest
import torch
from failing_files import Killed, failing_store
from said import raises_telling, tells
from small_checkpoints import good, loaded, one, refused, save_one, tried_by_ranks

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError, manifest_format as disk, open_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import find, saved_iterations
from megatron.core.dist_checkpointing.publish_by_rename_and_cleanup import (
    delete,
    set_aside_damaged,
    try_clear_leftovers,
)
from megatron.core.storage import file_layer, fsspec_object_store, object_store_read_ahead
from megatron.core.storage.fsspec_object_store import ObjectFiles
from megatron.core.storage.object_store_read_ahead import FileSpan
from megatron.core.storage.path_or_url import ObjectPath, is_url, path_of

ROOT = "memory://bucket/run"
STORE = fsspec.filesystem("memory").store


@pytest.fixture(autouse=True)
def empty_store():
    STORE.clear()
    yield
    STORE.clear()


def value(root, iteration=None):
    """The one value that both tensors of a checkpoint hold; None where there is no checkpoint."""
    try:
        values = [loaded(root, iteration, name).unique().tolist() for name in ("w", "v")]
    except CheckpointError:
        return None
    assert values[0] == values[1] and len(values[0]) == 1, "never a part of the old and a part of the new"
    return values[0][0]


def save(iteration, number):
    x = torch.full((3, 4), float(number))
    save_one(ROOT, iteration, w=x, v=x)


def names():
    """What is in the store; the mark of a save is left out."""
    found = [name.removeprefix("/bucket/run/") for name in STORE]
    return sorted(re.sub(r"\.[0-9a-f]{16}\.", ".", name) for name in found)


def of_checkpoints(*iterations):
    folders = [f"iter_{number:07d}" for number in iterations]
    return sorted(
        [disk.LATEST, *(f"{folder}/{name}" for folder in folders for name in (disk.MANIFEST, "rank_00000.bin"))]
    )


# ---------------------------------------------------------------- paths


def test_a_url_keeps_its_slashes_on_any_way_from_it():
    path = ObjectPath("s3://bucket/a/iter_0000002.partial")
    for got, expected in (
        (path.parent / "x", "s3://bucket/a/x"),
        (path.with_suffix(""), "s3://bucket/a/iter_0000002"),
        (path.with_name("y"), "s3://bucket/a/y"),
        (path.parent.parent, "s3://bucket"),
        (path.absolute(), str(path)),
    ):
        assert (str(got), type(got)) == (expected, ObjectPath)
    assert path_of("a/b").parts == ("a", "b") and str(path_of("file:///tmp/x")) == "/tmp/x"
    assert is_url("memory://a/b") and not is_url("a/b") and not is_url("file:///tmp")


def test_a_url_that_cannot_be_read_here_is_refused_in_one_line(monkeypatch):
    with raises_telling(ConfigError, "nope://a/b nope"):
        path_of("nope://a/b")
    with raises_telling(ConfigError, "memory://"):
        path_of("memory://")
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda scheme: (_ for _ in ()).throw(ImportError("Install it")))
    with pytest.raises(ConfigError) as error:
        path_of("s3://bucket/run")
    assert "\n" not in str(error.value) and tells(error.value, "s3://bucket/run pip install .[s3]")


# ---------------------------------------------------------------- saves


def test_saves_leave_the_objects_of_their_checkpoints_and_no_others():
    for iteration in (1, 2, 2):
        save(iteration, 7)
    assert names() == of_checkpoints(1, 2)
    assert value(ROOT) == value(ROOT, 1) == 7 and find(path_of(ROOT)).iteration == 2


def test_ranks_write_an_object_each_and_a_reader_takes_only_the_bytes_of_its_boxes(monkeypatch):
    big = torch.arange(4096.0).view(64, 64)

    def work(world):
        each = enumerate({"w": big, "v": big + 1}.items())
        tensors = {name: replace(one(x), is_writer=world.rank == rank) for rank, (name, x) in each}
        return save_checkpoint(ROOT, 1, tensors, {}, world)

    good(tried_by_ranks(2, work))
    assert names() == sorted([*of_checkpoints(1), "iter_0000001/rank_00001.bin"])
    kind, asked = type(fsspec.filesystem("memory")), []
    real = kind.cat_file

    def noted(self, path, start, end):
        asked.append((path, end - start))
        return real(self, path, start, end)

    monkeypatch.setattr(kind, "cat_file", noted)
    assert loaded(ROOT, name="v", shape=(64, 64)).equal(big + 1)
    tensors = [(path, size) for path, size in asked if path.endswith(".bin")]
    assert len(tensors) == 1 and "rank_00001" in tensors[0][0] and tensors[0][1] == big.nbytes


def test_spans_that_touch_are_asked_for_together_and_long_ones_in_parts(monkeypatch):
    monkeypatch.setattr(object_store_read_ahead, "REQUEST_BYTES", 10)
    a, b = ObjectPath("memory://bucket/a"), ObjectPath("memory://bucket/b")
    spans = [
        FileSpan(a, 0, 3),
        FileSpan(a, 3, 3),
        FileSpan(a, 3, 14),
        FileSpan(a, 20, 24),
        FileSpan(b, 24, 44),
        FileSpan(b, 50, 50),
    ]
    assert list(object_store_read_ahead.requests_of(spans)) == [
        (a, 0, 10),
        (a, 10, 14),
        (a, 20, 24),
        (b, 24, 34),
        (b, 34, 44),
    ]
    assert list(object_store_read_ahead.requests_of([])) == []


def test_requests_are_under_way_together_and_their_bytes_come_in_order(monkeypatch):
    monkeypatch.setattr(object_store_read_ahead, "REQUEST_BYTES", 3)
    data, all_begun = bytes(range(100)), threading.Barrier(object_store_read_ahead.UNDER_WAY)

    class Object:
        def fetch(self, start, stop):
            all_begun.wait(30.0)  # nobody comes back before so many have begun
            return data[start:stop]

    a, length = ObjectPath("memory://bucket/a"), 2 * 3 * object_store_read_ahead.UNDER_WAY
    with object_store_read_ahead.ReadAhead([FileSpan(a, 0, length)], lambda path: Object()) as read:
        got = b""
        while more := bytes(read.take(a, len(got))):
            got += more
    assert got == data[:length]


def test_an_error_of_a_request_ahead_is_told_of_at_its_span_and_an_object_that_ends_early_is_damaged(monkeypatch):
    monkeypatch.setattr(object_store_read_ahead, "REQUEST_BYTES", 64)
    x = torch.arange(64.0)
    save_one(ROOT, 1, w=x, v=x + 1)
    kind = type(fsspec.filesystem("memory"))
    real = kind.cat_file

    def fails(self, path, start, end):
        if start >= 320:
            raise OSError(errno.ECONNRESET, "gone")
        return real(self, path, start, end)

    def ends(self, path, start, end):
        return (
            real(self, path, start, end)[: max(320 - start, 0)]
            if path.endswith(".bin")
            else real(self, path, start, end)
        )

    monkeypatch.setattr(kind, "cat_file", fails)
    assert loaded(ROOT, name="w", shape=(64,)).equal(x)
    with refused("cannot be read gone 'v'"):
        loaded(ROOT, name="v", shape=(64,))
    monkeypatch.setattr(kind, "cat_file", ends)
    with refused("ends before the last 192 bytes 'v'"):
        loaded(ROOT, name="v", shape=(64,))


@pytest.mark.full
@pytest.mark.parametrize(
    "before, iteration, how",
    [
        pytest.param(
            before,
            iteration,
            how,
            id=f"{name}-{how}",
            marks=[] if (name, how) == ("again", "killed") else [pytest.mark.full],
        )
        for name, (before, iteration) in {"first": ([], 1), "new": ([1], 2), "again": ([1], 1)}.items()
        for how in ("killed", "ENOSPC")
    ],
)
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(before, iteration, how):
    """At every call that changes the store, one after the other; the next save needs no help, and nothing is left over."""
    for dies_at in range(1, 100):
        with failing_store(0, "", only=lambda call: call.changes_disk) as calls, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in before:
                save(number, 0)
            calls.at, calls.how = len(calls.made) + dies_at, how
            ended = None
            try:
                save(iteration, 1)
            except (Killed, CheckpointError) as error:
                ended = error
            calls.dead = set()
            if calls.hit is None:
                break
            assert ended is not None or value(ROOT) == 1, calls.hit
            if isinstance(ended, CheckpointError):
                assert "the latest checkpoint is intact" in str(ended) or not before, calls.hit
            for number in before:
                assert value(ROOT, number) in ([0, 1] if number == iteration else [0]), calls.hit
            assert value(ROOT) in ([0, 1] if before else [None, 1]), calls.hit
            save(3, 3)
            assert value(ROOT) == 3
            assert names() == of_checkpoints(*saved_iterations(path_of(ROOT))), calls.hit
    assert dies_at > 10, "there are so many calls"


def test_a_removal_that_ends_anywhere_leaves_nothing_that_looks_complete():
    for dies_at in range(1, 20):
        with failing_store(0, "", only=lambda call: call.changes_disk) as calls:
            save(1, 1), save(2, 2)
            calls.at, calls.how = len(calls.made) + dies_at, "killed"
            try:
                delete(path_of(ROOT) / "iter_0000001")
            except Killed:
                calls.dead = set()
            else:
                break
            assert value(ROOT, 1) in (None, 1) and value(ROOT) == 2
            assert try_clear_leftovers(path_of(ROOT)) == []
            assert names() == of_checkpoints(*saved_iterations(path_of(ROOT)))
    assert dies_at > 4


def test_objects_of_others_stay_and_their_folder_is_not_taken():
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"{ROOT}/iter_0000001/model.pt", b"another's")
    with refused("iter_0000001 manifest.json"):
        save(1, 1)
    save(2, 2), save(2, 3)
    fs.pipe_file(f"{ROOT}/iter_0000002/notes.txt", b"mine")
    save(2, 4)
    assert {"iter_0000001/model.pt", "iter_0000002/notes.txt"} < set(names()) and value(ROOT) == 4


def test_a_late_object_of_a_killed_save_harms_no_later_one():
    """A rank that its job has left behind may end its upload after the iteration was saved again."""
    save(1, 1)
    late = next(name for name in STORE if name.endswith(".bin"))
    data = fsspec.filesystem("memory").cat_file(late)
    save(1, 2)
    fsspec.filesystem("memory").pipe_file(late, data)
    assert value(ROOT) == 2


def test_a_damaged_checkpoint_is_set_aside_where_it_is_and_its_iteration_saved_again():
    save(1, 1), save(2, 2)
    damaged = next(name for name in STORE if "iter_0000002/rank" in name)
    STORE[damaged].getbuffer()[0] ^= 1
    with refused("sha256"):
        loaded(ROOT)
    assert set_aside_damaged(path_of(ROOT) / "iter_0000002").name == "iter_0000002.damaged"
    assert saved_iterations(path_of(ROOT)) == [1]
    save(2, 3), save(2, 4)
    assert value(ROOT) == 4 and damaged in STORE and "iter_0000002.damaged/manifest.json" in names()


def test_a_pointer_without_its_checkpoint_is_named():
    save(1, 1)
    fsspec.filesystem("memory").rm(f"{ROOT}/iter_0000001/manifest.json")
    with refused("manifest.json"):
        open_checkpoint(ROOT)


# ---------------------------------------------------------------- the store's own errors


class Broken:
    """A store of which every call fails with `error`."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def fail(*_, **__):
            raise self.error

        return fail


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "lost"), RuntimeError("no route"), builtins.TimeoutError(), PermissionError("denied")]
)
def test_an_error_of_the_network_is_told_of_and_is_no_damage(error):
    """EIO would say that a disk has lost its bytes, and a run would go back to an older checkpoint."""
    save(1, 1)
    file_layer.stores["memory"] = broken = ObjectFiles("memory")
    broken._stores[os.getpid()] = Broken(error)
    try:
        for call in (
            lambda: file_layer.exists(path_of(ROOT)),
            lambda: file_layer.backend_of(path_of(ROOT)).names(path_of(ROOT)),
        ):
            with pytest.raises(OSError) as told:
                call()
            assert told.value.errno not in (errno.EIO, errno.ENOENT, None) and str(told.value.filename) == ROOT
        with pytest.raises(CheckpointError) as told:
            open_checkpoint(ROOT)
        assert told.value.advice != disk.DAMAGED
    finally:
        del file_layer.stores["memory"]
    assert value(ROOT) == 1


def test_a_file_whose_writer_fails_does_not_appear(monkeypatch):
    monkeypatch.setattr(fsspec_object_store, "PART", 10)
    on, path = file_layer.backend_of(path_of(ROOT)), path_of(ROOT) / "x"
    with pytest.raises(Killed), on.open(path, "wb") as file:
        file.write(b"12345")
        raise Killed("here")
    assert names() == []
    with on.open(path, "wb") as file:
        assert [file.write(b"123456"), file.write(b"7890abcdef"), file.tell()] == [6, 10, 16]
    assert file_layer.read_start(path, 100) == b"1234567890abcdef"


def test_what_a_save_says_of_itself_is_removed_last_and_tells_all():
    with failing_store(0, "", only=lambda call: call.changes_disk) as calls:
        save(1, 1)
        removed = [call for call in calls.made if call.kind.startswith("remove")]
        assert removed[-1].name.endswith("save.json")
        calls.at, calls.how = len(calls.made) + 4, "killed"
        with pytest.raises(Killed):
            save(1, 2)
        calls.dead = set()
        said = json.loads(file_layer.read_start(path_of(ROOT) / "iter_0000001.partial" / "save.json", 1000))
        assert len(said["mark"]) == 16 and all(name.startswith("rank_00000.") for name in said["remove"])
