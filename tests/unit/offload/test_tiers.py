"""Tiers: what is written is read back whatever ranges are asked for, damage is found and said, folders are claimed and given back."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from said import tells

from megatron.core.base.async_handle import done
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.distributed.bucket_reduce_and_gather import Bucket
from megatron.core.offload import checksummed_file
from megatron.core.offload.checksummed_file import BlockFile, OffloadError
from megatron.core.offload.host_and_file_stores import FileOffloadStore, FileTensor, HostOffloadStore
from megatron.core.offload.offload_folder import RankFolder, offload_folder_conflicts, remove_surplus_rank_folders
from megatron.core.offload.optimizer_and_param_offload_config import OffloadConfig
from megatron.core.offload.optimizer_offload_fraction import cut_by_fraction, cut_in_slices
from megatron.core.offload.tensor_in_memory_or_file import copy_stored, read_parts, start_reading, start_writing
from megatron.core.optimizer.adam_and_sgd import UpdateStep, adam_update
from megatron.core.optimizer.cpu_offloading import sliced_update
from megatron.core.optimizer.cpu_offloading.sliced_update import Segment, SlicedUpdater
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.parallel.rank_grid import ALONE
from megatron.training.memory.memory_check import disk_and_memory_problems
from megatron.training.memory.read_free_host_memory import free_below_rlimit_data, free_on_machine
from megatron.training.memory.zero_state_bytes_by_tier import Element, amount, bytes_line, predicted_bytes_by_tier

ROOT = Path(__file__).parents[3]
BLOCK, KINDS = 64, ("exp_avg", "exp_avg_sq")


@pytest.fixture
def tier(tmp_path):
    tier = FileOffloadStore(tmp_path / "off", 3, block=BLOCK)
    yield tier
    tier.close()


# ---------------------------------------------------------------- ranges


def test_a_file_tensor_is_a_tensor_to_those_who_read_and_write_ranges(tier):
    """100 random reads and writes of random ranges, in flight together, against a tensor in memory."""
    draw, n = random.Random(1), 1000
    stored, mirror = tier.zeros(n, torch.float32), torch.zeros(n)
    other = tier.zeros(10, torch.float64)
    pending, compared = [], []
    for step in range(100):
        start = draw.randrange(n)
        stop = draw.randrange(start, n) + 1
        if draw.random() < 0.5:
            values = torch.full((stop - start,), float(step)) + torch.arange(stop - start)
            pending.append(start_writing(stored[start:stop], values))
            mirror[start:stop] = values
        else:
            expected, read = mirror[start:stop].clone(), start_reading(stored[start:stop])
            compared.append((read, expected))
    assert all(torch.equal(read.wait(), expected) for read, expected in compared)
    for written in pending:
        written.wait()
    assert torch.equal(torch.cat(list(read_parts(stored))), mirror)
    assert start_reading(other).wait().tolist() == [0.0] * 10


def test_boxes_of_a_file_tensor_are_those_of_a_tensor(tier):
    stored, mirror = tier.zeros(60, torch.bfloat16).view((5, 4, 3)), torch.zeros(5, 4, 3, dtype=torch.bfloat16)
    for number, box in enumerate(
        (((0, 5), (0, 4), (0, 3)), ((1, 3), (0, 4), (0, 3)), ((2, 5), (1, 2), (0, 3)), ((0, 2), (3, 4), (1, 3)))
    ):
        where = tuple(slice(*span) for span in box)
        values = torch.arange(mirror[where].numel()).view(mirror[where].shape) + 10.0 * number
        stored.put(box, values)
        mirror[where] = values.bfloat16()
    assert torch.equal(start_reading(stored).wait(), mirror)
    assert torch.equal(start_reading(stored.box(((1, 3), (0, 4), (0, 3)))).wait(), mirror[1:3])
    scalar = tier.zeros(1, torch.float32).view(())
    scalar.put((), torch.tensor(3.0))
    assert start_reading(scalar).wait().item() == 3.0


def test_copies_between_file_and_memory_convert(tier, monkeypatch):
    monkeypatch.setattr("megatron.core.offload.tensor_in_memory_or_file._CHUNK", 256)
    source, there, back = torch.randn(333), tier.zeros(333, torch.bfloat16), torch.zeros(333)
    copy_stored(there, source)
    copy_stored(back, there)
    assert torch.equal(back, source.bfloat16().float())
    host = HostOffloadStore(torch.device("cpu")).zeros(5, torch.float32)
    copy_stored(host, source[:5])
    assert torch.equal(host, source[:5])


def test_nothing_can_be_read_and_written(tier):
    empty = tier.zeros(8, torch.float32)[:0]
    start_writing(empty, torch.empty(0)).wait()
    assert start_reading(empty).wait().shape == (0,) and list(read_parts(empty)) == []


# ---------------------------------------------------------------- damage


def test_a_flipped_bit_is_found_wherever_it_is(tier):
    stored = tier.zeros(100, torch.float32)
    start_writing(stored, torch.randn(100)).wait()
    path = tier.folder.path / "state"
    for at in (0, 63, 64, 250, 399):
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        number = at // 4
        with pytest.raises(OffloadError, match=f"{at // 64 * 64}"):
            start_reading(stored[number : number + 1]).wait()
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
    start_reading(stored).wait()


def test_a_file_cut_off_is_an_error_in_words_and_writing_beside_damage_does_not_bless_it(tier):
    stored = tier.zeros(100, torch.float32)
    start_writing(stored, torch.ones(100)).wait()
    path = tier.folder.path / "state"
    with open(path, "r+b") as file:
        file.seek(5)
        file.write(b"x")
    with pytest.raises(OffloadError):
        start_writing(stored[8:9], torch.ones(1)).wait()
    os.truncate(path, 300)
    with pytest.raises(OffloadError, match=r"(?s)320.*448.*--offload-dir"):
        start_reading(stored[80:90]).wait()


def adam(beta1: float = 0.9):
    """The update of every group."""
    return lambda group: partial(adam_update, beta1=beta1, beta2=0.99, eps=1e-8)


@pytest.mark.parametrize("number", range(6))
def test_an_update_ends_when_its_last_write_does(tier, number, monkeypatch):
    """Two slices of a master and two moments: whichever of the six writes fails, the step that began it does."""
    write, written = BlockFile.write, []

    def fail(self, start, data):
        written.append(start)
        if len(written) == number + 1:
            time.sleep(0.05)  # until all is begun that may be
            raise OffloadError("this write")
        write(self, start, data)

    state = [tier.zeros(32, torch.float32) for _ in range(3)]
    segment = Segment(ParamGroup(), state[0], dict(zip(KINDS, state[1:])), torch.ones(32), None)
    updater = SlicedUpdater([segment], adam(), 16)
    monkeypatch.setattr(BlockFile, "write", fail)
    with pytest.raises(OffloadError, match="this write"):
        updater.step(lambda _: UpdateStep(0.1, 0.0, 0))


@pytest.mark.parametrize("copied", [False, True])
def test_gradients_are_multiplied_once_where_they_lie_too(copied: bool, monkeypatch):
    """The host updates with a copy of what lies on an accelerator, and what looks at gradients afterwards finds the clipped ones."""
    if copied:
        monkeypatch.setattr(sliced_update, "_start_fetching", lambda stored: done(stored.clone()))
    state, gradients = [torch.zeros(32) for _ in range(3)], torch.full((32,), 3.0)
    segment = Segment(ParamGroup(), state[0], dict(zip(KINDS, state[1:])), gradients, None, is_offloaded=True)
    updater = SlicedUpdater([segment], adam(beta1=0.0), 16)
    updater.step(lambda _: UpdateStep(0.1, 0.0, 0, 0.5))
    torch.testing.assert_close(gradients, torch.full((32,), 1.5))
    torch.testing.assert_close(state[1], torch.full((32,), 1.5))  # with beta1 = 0 the moment is the gradient


def test_what_other_groups_have_updated_is_in_the_file_when_the_call_is_over(tier, monkeypatch):
    """Hybrid shards with parameters in files: a write that fails is the step's error, though whoever reads next would wait for it."""

    def fail(*_):
        time.sleep(0.05)
        raise OffloadError("this write")

    bucket = SimpleNamespace(
        param_shard=tier.zeros(32, torch.float32),
        buffer=SimpleNamespace(axes=SimpleNamespace(outer=ALONE), device=torch.device("cpu")),
    )
    monkeypatch.setattr(BlockFile, "write", fail)
    with pytest.raises(OffloadError, match="this write"):
        Bucket.gather_updated(bucket)


def test_a_full_disk_is_an_error_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = BlockFile(tmp_path / "state", BLOCK)
    file.extend(100)
    monkeypatch.setattr(checksummed_file.os, "pwrite", full)
    with pytest.raises(OffloadError, match=r"state.* 0 .*No space left on device"):
        file.write(3, memoryview(b"abc"))
    monkeypatch.setattr(checksummed_file.os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"(?s)1,000.*--optimizer-offload-fraction"):
        file.extend(1000)
    file.close()


@pytest.mark.full
def test_a_disk_that_is_really_full_is_the_same_error(tmp_path):
    """A limit on the size of files stands for the disk; it holds for a process."""
    code = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        from pathlib import Path
        from megatron.core.offload.checksummed_file import BlockFile
        BlockFile(Path({str(tmp_path / "state")!r})).extend(3 << 20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "OffloadError" in done.stderr and tells(done.stderr, "3,145,728")


# ---------------------------------------------------------------- folders


def test_a_folder_is_one_run_s_own_until_it_is_given_back(tmp_path):
    first = FileOffloadStore(tmp_path, 0)
    FileOffloadStore(tmp_path, 1).close()
    with pytest.raises(ConfigError, match=rf"(?s)rank_00000.*{os.getpid()}"):
        FileOffloadStore(tmp_path, 0)
    assert len(offload_folder_conflicts(tmp_path, 0)) == 1 and offload_folder_conflicts(tmp_path, 1) == []
    first.close()
    assert list(tmp_path.iterdir()) == []
    FileOffloadStore(tmp_path, 0).close()


def test_memory_that_the_host_has_not_is_an_error_in_words():
    with pytest.raises(OffloadError, match=r"(?s)4,503,599,627,370,496.*--offload-dir"):
        HostOffloadStore(torch.device("cpu")).zeros(2**50, torch.float32)


def test_a_relative_folder_is_given_back_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    tier = FileOffloadStore("off", 0)
    monkeypatch.chdir("elsewhere")
    tier.close()
    assert list((tmp_path / "off").iterdir()) == []


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    """Its pid may be another process's by now; its lock went with it."""
    code = f"""
        import os, signal
        from megatron.core.offload.offload_folder import RankFolder
        from megatron.core.offload.checksummed_file import BlockFile
        folder = RankFolder({str(tmp_path)!r}, 0)
        BlockFile(folder.path / "state", 64).extend(1000)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "rank_00000" / "state").stat().st_size == 1024
    assert offload_folder_conflicts(tmp_path, 0) == []
    folder = RankFolder(tmp_path, 0)
    assert not (folder.path / "state").exists()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_of_more_ranks_left_is_removed(tmp_path):
    """Its disk would stay taken: no rank of the smaller run claims these folders. What lives or is not ours stays."""
    for name in ("rank_00001", "rank_00002", "rank_00005", "rank_x"):
        (tmp_path / name).mkdir()
        for file in ("lock", "state"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "rank_00005" / "thesis.tex").touch()
    living = RankFolder(tmp_path, 3)
    assert remove_surplus_rank_folders(tmp_path, 2) == ["rank_00002"]
    assert {path.name for path in tmp_path.iterdir()} == {"rank_00001", "rank_00003", "rank_00005", "rank_x"}
    living.remove()


MAKERS_AND_MESSAGES = [
    (lambda folder: (folder.mkdir(), (folder / "thesis.tex").touch()), r"--offload-dir .*thesis.tex"),
    (lambda folder: folder.touch(), "rank_00002 is a file; choose another folder"),
]


@pytest.mark.parametrize(("make", "message"), MAKERS_AND_MESSAGES)
def test_a_folder_with_something_else_is_refused(tmp_path, make, message):
    make(tmp_path / "rank_00002")
    with pytest.raises(ConfigError, match=message):
        FileOffloadStore(tmp_path, 2)
    with pytest.raises(ConfigError, match="Not a directory"):
        RankFolder(
            tmp_path / "rank_00002" / "thesis.tex" if (tmp_path / "rank_00002").is_dir() else tmp_path / "rank_00002", 0
        )


def test_the_folder_goes_with_the_tier(tmp_path):
    """Also where nobody closes it."""
    tier = FileOffloadStore(tmp_path, 0)
    tensor = tier.zeros(10, torch.float32)
    assert isinstance(tensor, FileTensor)
    del tier, tensor
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- plans


def test_a_share_is_cut_where_a_parameter_starts():
    starts = [0, 40, 72, 200]
    whole = [(0, 256)]
    assert cut_by_fraction(whole, starts, 0.0) == ([], whole)
    assert cut_by_fraction(whole, starts, 0.1) == ([(0, 40)], [(40, 256)])
    assert cut_by_fraction(whole, starts, 0.2) == ([(0, 72)], [(72, 256)])
    assert cut_by_fraction(whole, starts, 0.9) == (whole, [])
    shard = [(32, 64), (128, 160)]  # of two buckets
    assert cut_by_fraction(shard, starts, 0.5) == ([(32, 64)], [(128, 160)])
    assert cut_by_fraction(shard, starts, 0.1) == ([(32, 40)], [(40, 64), (128, 160)])
    assert cut_by_fraction(shard, starts, 1.0) == (shard, [])
    assert cut_by_fraction([], starts, 1.0) == ([], [])


def test_slices_cover_a_run_once():
    assert cut_in_slices(5, 30, 10) == [(5, 15), (15, 25), (25, 30)]
    assert cut_in_slices(5, 5, 10) == []


@pytest.mark.parametrize("length", [0, 4, 1001])
def test_a_slice_that_would_end_within_a_vector_is_refused(length: int):
    """Adam's bits differ there: by slices of 1, 3, 5 or 7, 683 of 40,001 elements after 20 steps in float32, by 8 none."""
    with pytest.raises(ValueError, match=rf"(?s){length}.*8"):
        SlicedUpdater([], adam(), length)


def test_bytes_by_tier_are_the_published_sums():
    """ZeRO's table (arXiv:1910.02054, figure 1) with float32 gradients: 2 + 4 + 12 bytes a parameter of bfloat16 and Adam."""
    n, bf16 = 1 << 20, Element.of(2, moments=2)
    for stage, device in ((0, 18 * n), (1, (2 + 4) * n + 12 * n // 8), (2, 2 * n + 16 * n // 8), (3, 18 * n // 8)):
        found = predicted_bytes_by_tier(n, bf16, stage=stage, shards=8)
        assert sum(found["device"].values()) == device and list(found) == ["device"], stage
    away = predicted_bytes_by_tier(n, bf16, stage=3, shards=8, tier="file", offload_params=True)
    assert away["file"] == {"parameters": 2 * n // 8, "masters": 4 * n // 8, "moments": 8 * n // 8}
    assert away["device"] == {"gradients": 4 * n // 8} and away["host"] == {"slices": 3 * (n // 8) * 12}
    hybrid = predicted_bytes_by_tier(n, bf16, stage=3, shards=4, outer=2)["device"]  # (2 + 4) / 4 + 12 / (4 x 2)
    assert sum(hybrid.values()) == 6 * n // 4 + 12 * n // 8
    narrow = Element.of(2, moments=2, gradient=2)  # summed in float32, of which a rank has its shard
    for stage, device in ((1, (2 + 2) * n + 16 * n // 8), (2, 2 * n + 16 * n // 8)):
        assert sum(predicted_bytes_by_tier(n, narrow, stage=stage, shards=8)["device"].values()) == device, stage
    half = predicted_bytes_by_tier(n, Element.of(4, moments=1), tier="host", fraction=0.5)
    assert half == {"device": {"parameters": 4 * n, "gradients": 4 * n, "moments": 2 * n}, "host": {"moments": 2 * n}}
    kinds = re.findall(r"(device|host|parameters|gradients|moments) ([\d.]+) MiB", bytes_line(half))
    expected = {"device": "10.00", "parameters": "4.00", "gradients": "4.00", "moments": "2.00", "host": "2.00"}
    assert kinds == [*expected.items(), ("moments", "2.00")]
    assert amount(1023) == "1023 B" and amount(3 << 39) == "1.50 TiB"


# ---------------------------------------------------------------- settings and room


SETTINGS_AND_MESSAGES = [
    ({"optimizer_offload_fraction": 1.5}, "--optimizer-offload-fraction is 1.5"),
    ({"optimizer_cpu_offload": True, "offload_dir": "x"}, "--optimizer-cpu-offload --offload-dir"),
    ({"offload_params": True}, "--offload-params --offload-dir DIR --optimizer-cpu-offload"),
    (
        {"offload_params": True, "offload_dir": "x", "optimizer_offload_fraction": 0.5},
        "--offload-params --optimizer-offload-fraction 0.5",
    ),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS_AND_MESSAGES)
def test_settings_that_cannot_be_followed_are_refused(settings, message):
    with pytest.raises(ConfigError) as refused:
        OffloadConfig(**settings)
    assert tells(refused.value, message)


def need(**changes) -> dict:
    whole = {
        "disk": "a:1",
        "disk_free": 100,
        "disk_needs": 40,
        "host": "a",
        "host_free": 100,
        "process_free": None,
        "host_needs": 10,
        "device_has": None,
        "device_needs": 0,
        "dir": "D",
        "offloads": True,
        "flags_that_reduce": "--bf16",
    }
    return whole | changes


def test_what_does_not_fit_is_said_once_for_all_who_share_it():
    assert disk_and_memory_problems([need(), need()]) == ([], [])
    assert disk_and_memory_problems([need(), need(), need(disk="b:1", host="b")]) == ([], [])
    (disk,), _ = disk_and_memory_problems([need()] * 3)
    assert tells(disk, "--offload-dir 3 120 100")
    _, (host,) = disk_and_memory_problems([need(disk=None, disk_free=None, host_needs=60)] * 2)
    assert tells(host, "2 120 100 --offload-dir")
    _, (process,) = disk_and_memory_problems([need(), need(process_free=5)])
    assert process.startswith("rank 1 ") and tells(process, "10 5 ulimit")


def test_state_that_does_not_fit_is_said_of_machines_and_of_devices():
    plain = {"disk": None, "disk_free": None, "offloads": False}
    _, (host,) = disk_and_memory_problems(
        [need(**plain, host_needs=60), need(**plain, host_needs=50), need(**plain, host="b")]
    )
    assert tells(host, "2 110 100")
    assert "less with --bf16" in host and "--no-check-memory" in host
    devices = [need(**plain, device_has=10, device_needs=n) for n in (10, 12, 11)]
    _, (device,) = disk_and_memory_problems(devices)
    assert "rank 1 " in device and tells(device, "12 10")


def test_free_memory_is_the_container_s_where_it_has_less(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert free_on_machine(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_on_machine(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_on_machine(tmp_path, tmp_path) == 4000
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 300\ninactive_file 200\n")
    assert free_on_machine(tmp_path, tmp_path) == 4500, "pages of files are given up"
    assert free_on_machine(tmp_path / "no", tmp_path / "no") is None
    assert free_below_rlimit_data(tmp_path) is None


LINES_AND_PAGES = [
    ("0::/job/step", "job", "memory.max", "memory.current", "inactive_file"),
    ("4:cpu,memory:/job/step", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
]


@pytest.mark.parametrize(("line", "folder", "limit", "used", "pages"), LINES_AND_PAGES)
def test_a_limit_around_a_process_counts_in_either_version(tmp_path, line, folder, limit, used, pages):
    """As of a job of a cluster: the group of its step has no limit, that of the job does."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    (tmp_path / "meminfo").write_text("MemAvailable:   50 kB\n")
    inner = tmp_path / folder / "step"
    inner.mkdir(parents=True)
    for group, most in ((inner, "9223372036854771712"), (inner.parent, "5000")):
        (group / limit).write_text(most)
        (group / used).write_text("1000\n")
    (inner.parent / "memory.stat").write_text(f"{pages} 30\n")
    assert free_on_machine(tmp_path, tmp_path) == 4030
