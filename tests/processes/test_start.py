"""What cannot work is refused by every rank at once, in words. Processes, because exit codes and hangs are what is tested."""

from shlex import split

import pytest
from process_runs import GPT2, STEPS
from processes import PRETRAIN_GPT, Outcome, run

MOCK = [*GPT2, *STEPS, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--train-iters", "2"]

# what is wrong: (ranks, flags, all that the message says)
REFUSALS = {
    "world size": (3, ["--tensor-model-parallel-size", "2"], ["world size 3 is not a multiple of 2"]),
    "global batch size": (2, ["--global-batch-size", "6"], ["--global-batch-size (6) must be a multiple of 4"]),
    "not built yet": (
        2,
        ["--expert-model-parallel-size", "2"],
        ["--expert-model-parallel-size is 2", "--num-experts N"],
    ),
    "several at once": (
        2,
        split("--num-layer 3 --moe-latent-size 2 --weight-decay -1 --seed -5 --hidden-dropout 2"),
        [
            "cannot start, 5 problem(s)",
            "unknown flag --num-layer; did you mean --num-layers?",
            "--moe-latent-size",
            "--weight-decay is -1",
            "--seed is -5",
            "--hidden-dropout is 2",
        ],
    ),
    "sizes that the ranks do not divide": (
        2,
        split("--tensor-model-parallel-size 3 --pipeline-model-parallel-size 3"),
        [
            "--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (3)",
            "ffn hidden size (128)",
            "the number of layers (4) must be a multiple",
        ],
    ),
}


# test_refused_on_layouts.py has more kinds, in jobs that stay; here processes end.
FAST = ("world size", "several at once")


@pytest.mark.parametrize(
    "ranks, flags, said",
    [pytest.param(*case, id=name, marks=[pytest.mark.full] * (name not in FAST)) for name, case in REFUSALS.items()],
)
def test_bad_settings_are_refused_on_all_ranks_at_once(ranks, flags, said):
    outcome = run([PRETRAIN_GPT, *MOCK, *flags], ranks, timeout=20)
    assert_refused(outcome, said)


FLAGS = [
    "--lr 2e-2",
    "--seed 7",
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--global-batch-size 12",
]


@pytest.mark.parametrize("flags", FLAGS)
def test_ranks_with_different_settings_stop(flags):
    """The second of two ranks has a setting of its own, perhaps one that decides which groups there are."""
    outcome = run([PRETRAIN_GPT, *MOCK, "--distributed-timeout-minutes", "1"], 2, more={1: flags.split()}, timeout=20)
    assert_refused(outcome, ["the ranks were started with different settings"])


def test_a_rank_that_alone_has_a_bad_setting_is_heard():
    """Wherever the mistake is: a message that only the first rank may print would be lost."""
    outcome = run(
        [PRETRAIN_GPT, *MOCK, "--distributed-timeout-minutes", "1"], 2, more={1: ["--moe-latent-size", "2"]}, timeout=20
    )
    assert outcome.codes[1] == 2
    assert outcome.everything.count("--moe-latent-size") == 1
    assert outcome.codes[0] not in (0, None)


def test_partial_variables_of_a_launcher_are_refused():
    """A rank that was not told how many there are would train alone, on all the data."""
    started = (
        "import os, runpy, sys; os.environ['RANK'] = '1'; del sys.argv[0]; sys.path.insert(0, os.path.dirname(sys.argv[0]));"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    outcome = run(["-c", started, PRETRAIN_GPT, *MOCK], timeout=20)
    assert_refused(outcome, ["RANK is set but WORLD_SIZE is not"])


def assert_refused(outcome: Outcome, said: list[str]) -> None:
    """Every rank ended by itself with code 2, soon, and one of them said why, once, without a traceback."""
    assert set(outcome.codes) == {2}, outcome
    assert outcome.everything.count("cannot start") == 1, outcome
    assert "Traceback" not in outcome.everything, outcome
    for text in said:
        assert outcome.everything.count(text) == 1, f"{text!r} is not said once\n{outcome}"
    assert outcome.seconds < 20
