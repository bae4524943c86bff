"""Every file call of a save and of a load goes through `core/storage/files.py`, where tests can fail it."""

import os
import sys

import torch
from failing_files import READS, WRITES, counted, failing
from small_checkpoints import loaded, save_one


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


def asked_beside(calls, root, monkeypatch):
    """A list that what the system is asked about files below `root` is added to, where it is not through the file layer."""
    beside, watched = [], str(root)

    def note(what, *given):
        names = (os.fsdecode(x) for x in given if isinstance(x, str | bytes | os.PathLike))
        if not calls.is_inside and any(watched in name for name in names):
            beside.append((what, given))

    _heard.append(note)
    for name in ("stat", "lstat", "fsync", "access"):  # of these the interpreter does not tell
        real = getattr(os, name)
        heard = lambda *given, name=name, real=real, **more: (note(name, *given), real(*given, **more))[1]  # noqa: E731
        monkeypatch.setattr(os, name, heard)
    return beside


_heard = []
_is_listening = []


def listen():
    """An audit hook stays until the process ends, so there is one for all."""
    if not _is_listening:
        _is_listening.append(True)
        sys.addaudithook(lambda what, given: [tell(what, *given) for tell in _heard])


def test_no_file_call_of_a_save_or_a_load_goes_beside_the_file_layer(tmp_path, monkeypatch):
    """What a double of it cannot fail, no test would find."""
    listen()
    with counted() as calls:
        beside = asked_beside(calls, tmp_path, monkeypatch)
        try:
            for iteration in (1, 1, 2):
                save_one(tmp_path / "new", iteration, w=torch.ones(3, 4), v=torch.ones(3, 4))
            (tmp_path / "new" / "iter_0000003.partial").mkdir()
            assert beside.pop()[0] == "os.mkdir" and not beside, "it is heard of"
            save_one(tmp_path / "new", 4)
            assert loaded(tmp_path / "new").equal(torch.arange(12.0).view(3, 4))
        finally:
            _heard.clear()
    assert not beside
    assert {call.kind for call in calls.made} == {*READS, *WRITES}
