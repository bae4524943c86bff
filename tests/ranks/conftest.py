"""What tests of whole runs share: what they say, and checkpoints to go on from."""

from pathlib import Path

import pytest


def run(flags: str, **more) -> None:
    """whole_run's, which loads torch: on first use, since the process that hands out the tests to the others has none for it."""
    from whole_run import run

    run(flags, **more)


@pytest.fixture
def said(capsys):
    """What a run printed, after it has ended."""

    def run_and_read(flags: str, **more) -> str:
        run(flags, **more)
        return capsys.readouterr().out

    return run_and_read


@pytest.fixture
def refused(capsys):
    """What a run that must not start says."""

    def run_and_read(flags: str, **more) -> str:
        with pytest.raises(SystemExit) as stop:
            run(flags, **more)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return run_and_read


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of iterations 2 and 4."""
    root = tmp_path_factory.mktemp("runs") / "books"
    run(f"--train-iters 4 --save-interval 2 --save {root}")
    return root
