"""A script that asks torch.cuda and NCCL for everything runs unchanged by `python -m megatron.on_cpu`."""

import sys
from pathlib import Path

import pytest
from processes import run

from megatron import on_cpu

SCRIPT = Path(__file__).with_name("cuda_script.py")


@pytest.mark.full
def test_a_clusters_script_runs_and_ends_as_if_it_had_been_started_itself():
    done = run(["-m", "megatron.on_cpu", str(SCRIPT), "--flag", "value"], 2, timeout=120)
    assert done.codes == (1, 7), done.stderr
    said = done.stderr[0]
    traceback = said[said.index("Traceback") : said.index("megatron.on_cpu:")]
    assert traceback.count("  File") == 1 and f'File "{SCRIPT}", line' in traceback
    assert traceback.endswith("ValueError: the end of the script\n")
    mapped = "torch.cuda.set_device", "torch.distributed.init_process_group: nccl -> gloo", "autocast (2)"
    assert all(name in said for name in mapped) and "megatron.on_cpu:" not in done.stderr[1]


def test_without_a_script_it_says_how_it_is_called(capsys):
    assert [on_cpu.main([]), on_cpu.main(["--no"]), on_cpu.main(["missing.py"])] == [2, 2, 2]
    said = capsys.readouterr().err
    assert "usage: python -m megatron.on_cpu" in said and "--no" in said
    assert "cannot open missing.py: No such file or directory" in said
    assert "torch" in sys.modules or "megatron.porting.map_cuda_to_cpu" not in sys.modules
