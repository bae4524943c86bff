"""A stopped run goes on as if it had not stopped; a checkpoint serves any layout. Processes, because they start anew."""

import pytest
from process_runs import GPT2, STEPS, assert_same_checkpoint, rewound
from processes import Layout, Outcome, pretrain

STEPS_IN_ALL, LOG_INTERVAL = 8, 4
ZERO = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "2000"]
# (layout, more flags, the step after which to stop). A stop after step 6 cuts an interval of the log in two; the second run
# prints it whole.
STOPS = {
    "one process, float32": (Layout(), [], 6),
    "one process, float32, between intervals": (Layout(), [], 4),
    "2 x 2 ranks, bfloat16": (Layout(tp=2, pp=2, sp=True), ["--bf16", "--global-batch-size", "4"], 6),
    "2 x 2 ranks, ZeRO": (Layout(pp=2, dp=2), ["--bf16", *ZERO], 6),
}
COSTLY = [name for name in STOPS if name != "2 x 2 ranks, bfloat16"]  # test_restarts.py has one process


@pytest.mark.parametrize(
    "layout, more, stop", [pytest.param(*s, id=n, marks=[pytest.mark.full] * (n in COSTLY)) for n, s in STOPS.items()]
)
def test_resume_is_exact(layout, more, stop, data, tmp_path):
    """Loss, gradient norm, rate and validation to the last printed digit, and the last checkpoint to the last byte."""
    log = ["--log-interval", str(LOG_INTERVAL), "--eval-interval", "4", "--eval-iters", "2"]
    flags = [*GPT2, *STEPS, *data, *more, *log, "--train-iters", str(STEPS_IN_ALL), "--lr-warmup-iters", "3"]
    last = f"iter_{STEPS_IN_ALL:07d}"
    whole = pretrain([*flags, "--save", f"{tmp_path}/whole"], layout)
    assert [line.iteration for line in whole.training] == [4, 8]
    assert len(whole.validation) == 3
    root = tmp_path / "stopped"
    both = ["--save", str(root), "--load", str(root)]
    first = pretrain([*flags, *both, "--exit-interval", str(stop)], layout)
    assert (root / "latest_checkpointed_iteration.txt").read_text().strip() == str(stop)
    second = pretrain([*flags, *both], layout)
    assert first.printed + second.printed == whole.printed
    assert_same_checkpoint(root / last, tmp_path / "whole" / last)


FROM, TO_ONE, TO_DP = ("llama", Layout(tp=2, pp=2, sp=True)), Layout(), Layout(dp=2)


@pytest.mark.parametrize("layout", [TO_ONE, TO_DP], ids=str)
def test_weights_load_into_any_layout(layout, twenty_steps, tmp_path):
    """What four ranks saved gives the same validation loss elsewhere. A rate of 1e-30 leaves float32 weights as they are."""
    source = twenty_steps(*FROM)
    root = rewound(twenty_steps.saved(*FROM), 10, tmp_path / "weights")
    flags = [*twenty_steps.flags("llama"), "--lr", "1e-30", "--train-iters", "1", "--eval-interval", "1"]
    loaded = pretrain([*flags, "--finetune", "--load", str(root)], layout)
    assert source.validation[0].where == "iteration 10"
    assert loaded.validation[0].where == "iteration 1 on validation set"
    assert loaded.validation[0].loss == pytest.approx(source.validation[0].loss, rel=1e-5)


RESUMES = [
    ("llama", Layout(tp=2, pp=2, sp=True), Layout()),
    pytest.param("llama", Layout(tp=2, pp=2, sp=True), Layout(pp=2, dp=2), marks=pytest.mark.full),
    pytest.param("gpt2", Layout(), Layout(tp=2, pp=2, sp=True), marks=pytest.mark.full),
]


@pytest.mark.parametrize("model, source, target", RESUMES, ids=lambda value: str(value))
def test_training_goes_on_in_another_layout(model, source, target, twenty_steps, tmp_path):
    """With the optimizer's state: ten more steps, as one process would have made them, and as many samples consumed."""
    expected = twenty_steps(model)
    twenty_steps(model, source)
    root = rewound(twenty_steps.saved(model, source), 10, tmp_path / "other")
    resumed = pretrain([*twenty_steps.flags(model), "--load", str(root)], target)
    assert_close(resumed, expected, first=11)


def assert_close(got: Outcome, expected: Outcome, first: int) -> None:
    """The lines from iteration `first` on; tolerances as in test_losses_equal_one_process."""
    lines = [line for line in expected.training if line.iteration >= first]
    for a, b in zip(got.training, lines, strict=True):
        assert (a.iteration, a.lr, a.consumed_samples) == (b.iteration, b.lr, b.consumed_samples)
        assert a.loss == pytest.approx(b.loss, rel=2e-4), f"iteration {a.iteration}"
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=5e-3), f"iteration {a.iteration}"
