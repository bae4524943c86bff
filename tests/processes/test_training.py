"""Real processes train as one process does. Processes, because gloo, the launcher and the files are what is tested."""

import pytest
from processes import Layout, log_lines

LAYOUTS = [
    Layout(tp=2, sp=True),
    Layout(tp=4, sp=True),  # llama has two query groups, each shared by two of these ranks
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=2, v=2),
    Layout(dp=4),
    Layout(tp=2, pp=2, sp=True),
    Layout(tp=2, pp=2, dp=2, sp=True),
    Layout(tp=2, pp=2, dp=2, sp=True, v=2),
]
FAST = [("gpt2", i) for i in (2, 5)] + [("llama", 6)]  # the others are marked `full`
CASES = [
    pytest.param(model, layout, marks=[] if (model, i) in FAST else pytest.mark.full, id=f"{model}-{layout}")
    for model in ("gpt2", "llama")
    for i, layout in enumerate(LAYOUTS)
]

# float32 sums in another order, over 20 steps at a learning rate that lowers the loss by a tenth and more.
LOSS_TOLERANCE, NORM_TOLERANCE = 2e-4, 5e-3


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_equal_one_process(model, layout, twenty_steps):
    """Also with dropout: its masks depend on the sample and the place in the model, never on the rank."""
    one, many = twenty_steps(model), twenty_steps(model, layout)
    assert [line.iteration for line in one.training] == list(range(1, 21))
    assert one.training[-1].loss < 0.9 * one.training[0].loss, "nothing was learned, so little is compared"
    for a, b in zip(many.training, one.training, strict=True):
        assert (a.iteration, a.lr, a.consumed_samples) == (b.iteration, b.lr, b.consumed_samples)
        assert a.loss == pytest.approx(b.loss, rel=LOSS_TOLERANCE), f"iteration {a.iteration}"
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=NORM_TOLERANCE), f"iteration {a.iteration}"
    for a, b in zip(many.validation, one.validation, strict=True):
        assert (a.where, a.loss) == (b.where, pytest.approx(b.loss, rel=LOSS_TOLERANCE))


def test_only_the_last_rank_prints_log_lines(twenty_steps):
    """In the format that scripts parse: `log_lines` matches each from its first blank to its last."""
    outcome = twenty_steps("llama", Layout(tp=2, pp=2, sp=True))
    assert [len(log_lines(text)) for text in outcome.stdout[:-1]] == [0] * 3
    assert [line.where for line in outcome.validation] == [
        "iteration 10",
        "iteration 20 on validation set",
        "iteration 20 on test set",
    ]
    assert outcome.training[-1].text == outcome.printed[outcome.printed.index(outcome.validation[0].text) + 10]
    assert [line.consumed_samples for line in outcome.training] == list(range(8, 161, 8))


def test_ranks_that_do_not_log_print_almost_nothing(twenty_steps):
    """What is said once per run is said by the first rank and the last; at 10,000 ranks a line from each is a flood."""
    outcome = twenty_steps("llama", Layout(tp=2, pp=2, sp=True))
    assert [text for text in outcome.stdout[1:-1]] == [""] * 2
    assert [text for text in outcome.stderr] == [""] * 4
