"""tools/generate.py as processes: the launcher, the first rank's reading and the one voice of an error are what is tested."""

import pytest
from processes import ROOT, Job, Layout, Outcome, free_port, run

TOOL = str(ROOT / "tools" / "generate.py")
ONE = Layout()
SIZES = Layout(tp=2, pp=2)


@pytest.fixture(scope="module")
def saved(twenty_steps) -> str:
    """Checkpoints of a Llama with two query groups, written by 4 ranks."""
    twenty_steps("llama", Layout(tp=2, pp=2, sp=True))
    return str(twenty_steps.saved("llama", Layout(tp=2, pp=2, sp=True)))


def generate(saved: str, *flags: str, layout: Layout = ONE) -> Outcome:
    more = ["--load", saved, "--device", "cpu", "--max-new-tokens", "24", *flags, *layout.flags]
    return run([TOOL, *more], layout.ranks, timeout=60)


PROMPTS = ["--prompt", "def f(", "--prompt", "import os\nclass "]


DRAWINGS = [
    ["--greedy"],
    pytest.param(
        ["--temperature", "0.8", "--top-k", "40", "--seed", "3", "--num-samples", "2"], marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_four_ranks_write_what_one_process_writes(saved, drawing):
    one = generate(saved, *PROMPTS, *drawing).succeeded()
    four = generate(saved, *PROMPTS, *drawing, "--batch-size", "2", layout=SIZES).succeeded()
    assert four.stdout[0] == one.stdout[0] and "def f(" in one.stdout[0]
    assert set(four.stdout[1:]) == {""} and set(four.stderr[1:]) == {""}, "only the first rank speaks"
    assert "tokens/s" in four.stderr[0]


FORK = str(ROOT / "examples" / "minimal_fork" / "pretrain.py")
OF_FORK = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 4 --train-iters 2 --lr 1e-2 "
    "--eval-iters 0 --device cpu --tokenizer-type NullTokenizer --vocab-size 50 --branch-scale 0.7 --init-method-std 0.3"
)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2),
        pytest.param(Layout(cp=2), marks=pytest.mark.full),
        pytest.param(Layout(pp=3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_forks_layers_write_in_any_layout_what_one_process_writes(layout, tmp_path):
    """Also in stages of one and two layers, into which no training would divide them."""
    run([FORK, *OF_FORK.split(), "--save", str(tmp_path)], 1, timeout=60).succeeded()
    prompts = ["--prompt", "3 4 5", "--prompt", "7 8", "--greedy", "--model", FORK, "--max-new-tokens", "12"]
    one = generate(str(tmp_path), *prompts).succeeded()
    sharing = ["--context-parallel-size", str(layout.cp)] if layout.cp > 1 else []
    several = generate(str(tmp_path), *prompts, "--batch-size", "2", *sharing, layout=layout).succeeded()
    assert several.stdout[0] == one.stdout[0] and one.stdout[0].count("\n") == 4
    assert set(several.stdout[1:]) == {""} and set(several.stderr[1:]) == {""}, "only the first rank speaks"


@pytest.mark.full
def test_more_ranks_than_query_groups(saved):
    one, four = (generate(saved, *PROMPTS, "--greedy", layout=layout) for layout in (Layout(), Layout(tp=4)))
    assert four.succeeded().stdout[0] == one.succeeded().stdout[0]


@pytest.mark.full
def test_ranks_that_share_prompts_write_what_one_process_writes(saved):
    one = generate(saved, *PROMPTS, "--greedy").succeeded()
    shared = ["--context-parallel-size", "2", "--cp-comm-type", "all_gather", "--batch-size", "2"]
    four = generate(saved, *PROMPTS, "--greedy", *shared, layout=Layout(pp=2, cp=2)).succeeded()
    assert four.stdout[0] == one.stdout[0] and set(four.stdout[1:]) == {""}


@pytest.mark.full  # torchrun itself is tested in test_scripts.py
def test_runs_under_torchrun(saved):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), TOOL]
    flags = ["--load", saved, "--device", "cpu", "--prompt", "def ", "--greedy", "--pipeline-model-parallel-size", "2"]
    with Job([[*command, *flags]]) as job:
        outcome = job.wait(60).succeeded()
    assert outcome.stdout[0].startswith("def ")


CODES_AND_SAID = [
    (2, ["--prompt", "x", "--top-k", "0"], "--top-k is 0", SIZES),
    (
        2,
        ["--prompt", "x"],
        "--num-attention-heads (4) must be a multiple of --tensor-model-parallel-size (3)",
        Layout(tp=3),
    ),
    pytest.param(1, ["--prompt-file", "absent.txt"], "absent.txt", SIZES, marks=pytest.mark.full),
    (1, ["--prompt", "x " * 100], "has 101 tokens, above the model's --seq-length 64", SIZES),
]


@pytest.mark.parametrize(("code", "flags", "said", "layout"), CODES_AND_SAID)
def test_a_mistake_is_said_by_one_rank(saved, code, flags, said, layout):
    """Code 2 for flags, also for those that contradict the model of --load."""
    outcome = generate(saved, *flags, layout=layout)
    assert set(outcome.codes) == {code}, outcome
    assert outcome.everything.count(said) == outcome.everything.count("\n") == 1, outcome
