"""A run whose index cache was prepared builds nothing. A process, because the whole of a training command is what is compared."""

import re

import pytest
from conftest import GPT2, STEPS
from processes import PRETRAIN_GPT, log_lines, run

from tools import prepare_cache

LENGTH = ["--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1"]


@pytest.mark.full
def test_a_prepared_run_builds_nothing(data, tmp_path, capsys):
    at = data.index("--data-path")
    prefix, cache = data[at + 1], tmp_path / "cache"
    paths = ["0.7", prefix, "0.3", prefix]
    flags = [
        *GPT2,
        *STEPS,
        *LENGTH,
        *data[:at],
        "--data-path",
        *paths,
        *data[at + 2 :],
        "--data-cache-path",
        str(cache),
    ]
    assert prepare_cache.main(flags) == 0
    assert "building the index of" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    outcome = run([PRETRAIN_GPT, *flags], 2, timeout=60)
    assert set(outcome.codes) == {0}, outcome
    assert "building" not in outcome.everything
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == files
    said = re.findall(
        r"^(\w+) data: (\S+%) (\S+): .* ([\d,]+) samples of 64 are read", outcome.everything, re.MULTILINE
    )
    assert [split for split, *_ in said] == [split for split in ("train", "valid", "test") for _ in paths[::2]]
    # 16 samples, of which 11.2 and 4.8 are rounded up.
    assert said[0][1::2] == ("70.59%", "12")
    assert not log_lines("\n".join(line for line in outcome.everything.splitlines() if " data: " in line))
    assert prepare_cache.main(flags) == 0
    assert "building" not in capsys.readouterr().out
