"""Checkpoints in a store that speaks S3's protocol, by the client that the extra s3 installs."""

from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import torch
from request_points import Point, outcome
from s3_server import Request, s3_server
from small_checkpoints import loaded, refused, save_one

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.rank_grid import ALONE
from megatron.core.storage import fsspec_object_store
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing.check_and_lock_save_folder import prepare_folder

pytestmark = [
    pytest.mark.full,
    # found, not imported: that takes half a second of whoever collects
    pytest.mark.skipif(find_spec("s3fs") is None, reason="the extra [s3] is not installed"),
]

ROOT = "s3://bucket/run"


def test_a_save_is_read_back_and_leaves_only_its_objects():
    with s3_server() as store:
        for number in (1, 2, 2):
            save_one(ROOT, number)
        assert loaded(ROOT).equal(torch.arange(12.0).view(3, 4))
        assert len(store.objects) == 5 and not store.uploads


def test_a_long_object_goes_in_parts_and_comes_back_by_ranges(monkeypatch):
    monkeypatch.setattr(fsspec_object_store, "PART", 5 << 20)
    x = torch.arange(5 << 20, dtype=torch.float32)
    with s3_server() as store:
        save_one(ROOT, 1, w=x)
        assert [request.kind for request in store.made].count("PART") >= 2 and not store.uploads
        store.bytes_read = 0
        assert loaded(ROOT, shape=x.shape).equal(x)
        assert x.nbytes <= store.bytes_read < x.nbytes + 10_000


def test_a_store_that_answers_no_more_loses_nothing_and_is_told_of():
    with s3_server() as store:
        save_one(ROOT, 1)
        store.arm(3, "before", lambda request: request.kind == "PUT")
        with refused("iter_0000002.partial"):
            save_one(ROOT, 2)
        store.revive()
        assert loaded(ROOT).equal(torch.arange(12.0).view(3, 4))
        save_one(ROOT, 2)
        assert len(store.objects) == 5


@pytest.mark.parametrize("name", ["iter_0000002/rank_00001.bin", "iter_0000004/manifest.json"])
def test_a_run_whose_store_ends_goes_on_to_the_same_bits(name):
    """tests/support/request_points.py has every request."""
    scenario = "TP 2, async" if "rank" in name else "ZeRO 1, one kept"
    outcome(Point(scenario, Request("PUT", f"run/{name}"), 0, "after"))


def test_a_bucket_that_is_not_there_is_named():
    with s3_server(), pytest.raises(ConfigError, match="s3://nobody/run"):
        prepare_folder(CheckpointConfig(save="s3://nobody/run"), ALONE, torch.device("cpu"), ExitStack())
