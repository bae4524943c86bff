"""Context parallelism over gloo, where transfers are real: against torch's own ring attention, and with a rank that dies inside."""

import signal
from pathlib import Path

import pytest
from long_samples import KINDS, Text, documents
from process_runs import GPT2, STEPS
from processes import run
from token_files import write

SCRIPT, DYING = (str(Path(__file__).with_name(name)) for name in ("ring_ranks.py", "ring_dying_script.py"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_attention_and_its_gradients_are_those_of_torchs_ring(ranks: int):
    """In float64, to 1e-14 of each tensor's largest value."""
    outcome = run([SCRIPT], ranks).succeeded()
    assert all(text.count(" agree\n") == 4 * 4 for text in outcome.stdout)


def test_a_rank_that_dies_inside_the_ring_ends_all_by_its_name():
    mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "90"]
    died = run([DYING, *GPT2, *STEPS, *mock, "--context-parallel-size", "2"], 2, timeout=60)
    assert died.codes == (1, -signal.SIGKILL), died
    assert died.stderr[0].count("rank 0: stopping, because rank 1 ") == 1 and "Traceback" not in died.stderr[0], died


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(write(tmp_path_factory.mktemp("text") / "passages", documents(4 * 1024)), 1024)


@pytest.mark.parametrize("sharing", ["cp 4", pytest.param("cp 2 x tp 2", marks=pytest.mark.full)])
def test_samples_of_1024_tokens_that_four_processes_share_train_to_the_losses_of_one(text: Text, sharing: str):
    """Each of the four layers communicates in another way. The first line of the log has the sizes."""
    got = text.assert_shared(sharing, *KINDS)
    layout = got.stdout[0].split(";")[0].split(": ")[1].split(", ")
    assert set(sharing.split(" x ")) < set(layout), layout
