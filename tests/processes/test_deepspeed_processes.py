"""`megatron.deepspeed` over processes that have initialised torch.distributed themselves."""

from pathlib import Path

import pytest
from processes import run

SCRIPT = str(Path(__file__).with_name("deepspeed_script.py"))


@pytest.mark.full
def test_two_processes_have_the_weights_of_one(tmp_path: Path):
    outcome = run([SCRIPT, str(tmp_path)], 2).succeeded()
    assert all("deepspeed agrees" in text for text in outcome.stdout)
    assert (tmp_path / "3" / "latest").read_text() == "global_step3"


def test_collectives_have_torchs_results_whatever_names_the_operation_and_the_group():
    """Over processes: they are torch.distributed's."""
    outcome = run([str(Path(__file__).with_name("deepspeed_comm_script.py"))], 3).succeeded()
    assert all("every call agrees" in text for text in outcome.stdout)
