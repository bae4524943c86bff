"""Starts Python scripts as processes of their own without waiting for torch to be imported again by each.

A server imports what all of them need, once, and forks for every script that it is asked to run; the script then runs as
`python SCRIPT ARGUMENTS` would, with an environment, folder and files of its own, and ends as an interpreter ends. Nothing else
is shared: the server starts no thread and computes nothing.

    child = born(["pretrain_gpt.py", "--mock-data", ...], environment, folder, out, err)
    child.poll()        None while it runs, then its exit code, as of a subprocess.Popen
"""

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # a second of processor time, which the first backward of a pipeline stage asks for
    "numpy",
    "tokenizers",
    "megatron.training.training",
    "megatron.core.models.gpt.gpt_stage",
    "megatron.core.models.bert.bert_stage",
    "megatron.core.inference",
)


class Child:
    """A running script; as much of a subprocess.Popen as the tests need."""

    def __init__(self, pid: int, nursery: "_Nursery"):
        self.pid, self._nursery = pid, nursery

    def poll(self) -> int | None:
        return self._nursery.code_of(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self._nursery.listen(1.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Nursery:
    """The server, as its user sees it: a process that is written requests to, and says who was born and who has ended."""

    def __init__(self):
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._codes: dict[int, int] = {}
        self._born: list[int] = []
        self._heard = b""
        atexit.register(self._server.stdin.close)  # which ends it

    def bear(self, request: dict) -> Child:
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        while not self._born:
            self.listen(60.0)
        return Child(self._born.pop(), self)

    def code_of(self, pid: int) -> int | None:
        self.listen(0.0)
        return self._codes.get(pid)

    def listen(self, seconds: float) -> None:
        """Take in what the server has said, if it says something within so many seconds."""
        pipe = self._server.stdout.fileno()
        if not select.select([pipe], [], [], seconds)[0]:
            return
        more = os.read(pipe, 65536)
        if not more:
            raise RuntimeError("the server that starts processes has ended")
        *lines, self._heard = (self._heard + more).split(b"\n")
        for event, pid, code in map(json.loads, lines):
            if event == "born":
                self._born.append(pid)
            else:
                self._codes[pid] = code


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def born(command: Sequence[str], environment: Mapping[str, str], folder: str, out: Path, err: Path) -> Child:
    """`python COMMAND` in `folder`, in a session of its own; what it prints goes to the files `out` and `err`."""
    return _nursery().bear(
        {"command": list(command), "environment": dict(environment), "folder": folder, "out": str(out), "err": str(err)}
    )


# ---------------------------------------------------------------- the server


def _serve() -> dict | None:
    """Fork for each request. Returns the request in the child that is to follow it, and None in the server at its end."""
    heard, children = b"", set()
    while True:
        if select.select([0], [], [], 0.02)[0]:
            more = os.read(0, 65536)
            if not more:
                return None
            *lines, heard = (heard + more).split(b"\n")
            for line in lines:
                if (pid := os.fork()) == 0:
                    return json.loads(line)
                children.add(pid)
                _say("born", pid, 0)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                _say("ended", pid, os.waitstatus_to_exitcode(status))


def _say(event: str, pid: int, code: int) -> None:
    os.write(1, json.dumps([event, pid, code]).encode() + b"\n")


def _become(request: dict) -> None:
    """Turn this process into the one that was asked for."""
    os.setsid()
    for descriptor, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY),
        (2, request["err"], os.O_WRONLY),
    ):
        file = os.open(path, mode | (os.O_CREAT if descriptor else 0), 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    main = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    # Results of worker processes name classes of the script by the second name; the server had multiprocessing imported already.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for _name in _PRELOADED:
        __import__(_name)
    gc.collect()
    gc.freeze()  # a script's own collections need not walk through all this again, nor copy the pages that it lies on
    _request = _serve()
    if _request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as at a terminal, also where the tests run under nohup
        _become(_request)
