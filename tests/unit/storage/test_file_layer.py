"""Every file call of a save and of a load goes through `core/storage/file_layer.py`, where tests can fail it."""

import torch
from failing_files import READS, WRITES, counted, failing
from small_checkpoints import loaded, save_one
from traced_files import traced


def test_a_write_that_is_cut_short_is_gone_on_with(tmp_path):
    """A system may write or read fewer bytes than it is asked to."""
    with counted() as calls:
        save_one(tmp_path, 1)
        loaded(tmp_path)
    at = [n for n, call in enumerate(calls.made, 1) if call.kind in ("write", "read_into")]
    assert len(at) > 6
    for n, dies_at in enumerate(at, 2):
        with failing(dies_at, "short") as calls:
            save_one(tmp_path / str(n), 1)
            assert loaded(tmp_path / str(n)).equal(torch.arange(12.0).view(3, 4))
        assert calls.hit


def test_no_file_call_of_a_save_or_a_load_goes_beside_the_file_layer(tmp_path):
    """What a double of it cannot fail, no test would find."""
    with traced(tmp_path) as trace:
        for iteration in (1, 1, 2):
            save_one(tmp_path / "new", iteration, w=torch.ones(3, 4), v=torch.ones(3, 4))
        (tmp_path / "new" / "iter_0000003.partial").mkdir()
        assert trace.beside.pop()[0] == "os.mkdir" and not trace.beside, "it is heard of"
        save_one(tmp_path / "new", 4)
        assert loaded(tmp_path / "new").equal(torch.arange(12.0).view(3, 4))
    assert not trace.beside
    assert {call.kind for call in trace.calls} == {*READS, *WRITES}
