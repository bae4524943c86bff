"""tests/campaigns/artefacts.py: what was made is read to the same bits, and one bit that is another is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "campaigns" / "artefacts.py")
NAME = "checkpoint/fp16"


def call(command: str, folder: Path) -> tuple[int, str]:
    words = [sys.executable, SCRIPT, command, str(folder), "--only", NAME]
    ended = subprocess.run(words, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.sweep
def test_a_bit_that_is_another_is_told(tmp_path: Path):
    folder = tmp_path / "artefacts"
    assert call("make", folder)[0] == 0
    code, said = call("check", folder)
    assert code == 0 and f"equal   {NAME}" in said, said

    record = folder / "record.json"
    expected = record.read_text()
    loss = next(iter(json.loads(expected)["artefacts"][NAME]["numbers"].values()))["grad-norm"]
    digits, exponent = loss.split("p")
    record.write_text(expected.replace(loss, f"{int(digits[-1], 16) ^ 1:x}p".join((digits[:-1], exponent))))
    code, said = call("check", folder)
    assert code == 1 and f"DIFFERS {NAME}" in said and "/grad-norm: 0x" in said, said
    record.write_text(expected)

    (file,) = (folder / "kept" / NAME / "save").glob("iter_*/rank_00000.bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert call("check", folder)[0] == 1
