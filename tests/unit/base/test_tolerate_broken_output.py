"""Standard output and standard error that cannot be written any more end no process. Small processes of their own, with real pipes,
terminals and files."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.core.base import tolerate_broken_output

ROOT = Path(__file__).parents[3]
# Says what it has lost in a file, which is what a run's metrics and heartbeat are for.
START = f"""
import os, resource, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from megatron.core.base import tolerate_broken_output as outputs
outputs.keep_running(3)
def end():
    open(sys.argv[1], "w").write(repr([tuple(loss) for loss in outputs.losses]))
"""
LINES = """
for number in range(5):
    print("line", number, flush=True)
end()
"""


def gone_pipe() -> int:
    """A pipe whose reader has ended, as with `| head`."""
    ear, mouth = os.pipe()
    os.close(ear)
    return mouth


def lost_terminal() -> int:
    keeper, terminal = os.openpty()
    os.close(keeper)
    return terminal


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


LOST: dict[str, tuple[Callable[[], int], int]] = {
    "a pipe whose reader ended": (gone_pipe, errno.EPIPE),
    "a lost terminal": (lost_terminal, errno.EIO),
    "a full device": (full_device, errno.ENOSPC),
}


def process(code: str, folder: Path, out: int = subprocess.PIPE, err: int = subprocess.PIPE, **more):
    """(exit code, what it has lost, its output, its standard error)."""
    told = folder / "told"
    command = [sys.executable, "-c", START + code, str(told)]
    ended = subprocess.run(command, stdout=out, stderr=err, timeout=30, text=True, **more)
    losses = eval(told.read_text()) if told.exists() else None
    return ended.returncode, losses, ended.stdout, ended.stderr


@pytest.mark.parametrize("how", LOST)
def test_standard_output_that_is_lost_is_said_once_on_standard_error(how: str, tmp_path):
    make, number = LOST[how]
    handle = make()
    code, losses, _, said = process(LINES, tmp_path, out=handle)
    os.close(handle)
    why = os.strerror(number)
    assert (code, losses) == (0, [("standard output", why)])
    assert said == f"WARNING: rank 3: standard output cannot be written ({why}); the run goes on without it\n"


@pytest.mark.parametrize("how", LOST)
def test_standard_error_that_is_lost_is_said_on_standard_output(how: str, tmp_path):
    make, number = LOST[how]
    handle = make()
    code, losses, said, _ = process(
        'outputs.print_stderr("a"); outputs.write_to_stderr_or_stdout("b\\n"); print("c"); end()', tmp_path, err=handle
    )
    os.close(handle)
    why = os.strerror(number)
    assert (code, losses) == (0, [("standard error", why)])
    assert said.startswith(f"WARNING: rank 3: standard error cannot be written ({why})") and "c\n" in said, said


def test_both_on_one_lost_pipe_leave_what_reads_the_losses(tmp_path):
    """As in `2>&1 | head`. The interpreter's own flush at its end would give exit code 120."""
    handle = gone_pipe()
    code, losses, _, _ = process(
        LINES + "print('unflushed'); os.system('echo child; echo child >&2')", tmp_path, handle, handle
    )
    os.close(handle)
    assert code == 0
    assert losses == [(name, "Broken pipe") for name in ("standard output", "standard error")]


def test_two_threads_that_lose_both_at_once_do_not_wait_for_one_another(tmp_path):
    code = """
def lose(stream):
    for _ in range(200):
        print("x", file=stream, flush=True)
both = [threading.Thread(target=lose, args=(stream,)) for stream in (sys.stdout, sys.stderr)]
[one.start() for one in both]
[one.join() for one in both]
end()
"""
    handle = gone_pipe()
    code, losses, _, _ = process(code, tmp_path, handle, handle)
    os.close(handle)
    assert code == 0 and len(losses) == 2


def test_outputs_that_were_closed_at_the_start_lead_nowhere(tmp_path):
    """Without that the first file of the run gets the descriptor, and the prints of C libraries go into a checkpoint."""
    wanted = tmp_path / "checkpoint"
    code = f"""
file = open({str(wanted)!r}, "w")
print("to nobody", flush=True)
print("to nobody", file=sys.stderr, flush=True)
sys.stdout.flush()
os.write(1, b"from C")
os.write(2, b"from C")
end()
"""
    told, handles = tmp_path / "told", ">&- 2>&-"
    shell = f'exec "$0" -c "$1" "$2" {handles}'
    ended = subprocess.run(["sh", "-c", shell, sys.executable, START + code, str(told)], timeout=30)
    assert (ended.returncode, told.read_text(), wanted.read_text()) == (0, "[]", "")


def test_an_output_that_is_closed_in_between_is_lost(tmp_path):
    code, losses, _, said = process("os.close(1)" + LINES, tmp_path)
    assert (code, losses) == (0, [("standard output", os.strerror(errno.EBADF))]) and said.startswith("WARNING"), said


def test_a_reader_that_is_slow_behind_a_descriptor_that_does_not_wait_loses_nothing(tmp_path):
    code = """
os.set_blocking(1, False)
for number in range(2000):
    print("x" * 99, flush=True)
end()
"""
    told = tmp_path / "told"
    with subprocess.Popen([sys.executable, "-c", START + code, str(told)], stdout=subprocess.PIPE) as slow:
        assert slow.stdout.read(1) == b"x"
        rest = slow.stdout.read()
    assert (slow.returncode, len(rest), told.read_text()) == (0, 200_000 - 1, "[]")


def test_a_log_on_a_full_disk_goes_on_once_there_is_space_and_says_how_much_is_missing(tmp_path):
    """The limit on a file's size stands for the disk's end: both leave a write half done."""
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (15, resource.RLIM_INFINITY))
for number in range(4):
    print("line", number, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for number in range(4, 6):
    print("line", number, flush=True)
end()
"""
    log = tmp_path / "log"
    with log.open("wb") as file:
        code, losses, _, said = process(code, tmp_path, out=file.fileno())
    why = os.strerror(errno.EFBIG)
    assert (code, losses) == (0, [("standard output", why)]) and said.count("WARNING") == 1
    assert log.read_text() == f"line 0\nline 1\nl\n[13 bytes are missing here: {why}]\nline 4\nline 5\n"


def test_a_letter_that_the_encoding_lacks_is_escaped(tmp_path):
    code, _, said, _ = process('print("→"); end()', tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (code, said) == (0, "\\u2192\n")


@pytest.mark.parametrize("takes", ["outputs.keep_running(3)", "outputs.keep_running(answers=True)"])
@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "-u"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_reach_a_file_when_python_alone_would_write_them(takes: str, flags: list, unbuffered: str, tmp_path):
    """Of a process that ends without a flush. The oracle is Python's own streams."""
    prints = "import os, sys; print('out'); print('err', file=sys.stderr); sys.stdout.write('part'); os._exit(0)"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    found = []
    for code in (prints, f"{START.replace('outputs.keep_running(3)', takes)}{prints}"):
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("w") as to_out, err.open("w") as to_err:
            subprocess.run(
                [sys.executable, *flags, "-c", code, "told"], env=environment, stdout=to_out, stderr=to_err, timeout=30
            )
        found.append((out.read_text(), err.read_text()))
    assert found[0] == found[1]
    assert found[0] == ("out\npart" if flags or unbuffered else "", "err\n")


def test_a_stream_that_a_script_has_put_there_stays(monkeypatch):
    class Mine:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            pass

    mine = Mine()
    monkeypatch.setattr(sys, "stdout", mine)
    monkeypatch.setattr(sys, "stderr", mine)
    monkeypatch.setattr(tolerate_broken_output, "losses", [])
    tolerate_broken_output.keep_running()
    assert sys.stdout is mine and sys.stderr is mine
    tolerate_broken_output.print_stderr("to nobody")
    tolerate_broken_output.report_lost_output("a file", OSError(errno.EROFS, "Read-only file system"))
    tolerate_broken_output.flush()
    assert tolerate_broken_output.losses == [("a file", "Read-only file system")]
