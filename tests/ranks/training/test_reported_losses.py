"""What a run reports: `lm loss` and its perplexity are the cross entropy alone, whatever training adds to it, in every layout.

The oracle is torch's own cross entropy of the scores, and a run without label smoothing and z-loss from the same weights.
"""

import json
import math
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pretrain_t5
import pytest
import torch
import whole_run
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from token_files import write
from torch.nn import functional as F

import pretrain_bert
import pretrain_gpt
from megatron.core.models.common import language_model
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.parallel.mesh import Mesh
from megatron.core.transformer.transformer_layer import ParallelTransformerLayer
from megatron.training import get_runtime
from megatron.training.evaluate_window_chosen_by_iteration import evaluate
from megatron.training.monitor.training_log import Interval, StepNumbers, TrainingLog, training_line

SMOOTHING, Z, WORDS = 0.2, 0.01, 60
TERMS = f"--label-smoothing {SMOOTHING} --z-loss-coeff {Z} "
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --fp64 --micro-batch-size 2 --lr 1e-2 --device cpu "
    "--make-vocab-size-divisible-by 8 --num-workers 0 --global-batch-size 8 --train-iters 2 --eval-iters 1 --mock-data "
    f"--tokenizer-type NullTokenizer --vocab-size {WORDS - 1} --init-method-std 0.3 --attention-dropout 0 --hidden-dropout 0 "
)
T5 = SimpleNamespace(**vars(pretrain_t5), args_defaults=pretrain_t5.DEFAULTS | {"decoder_num_layers": 2})
SCRIPTS = {
    "GPT": (pretrain_gpt, ""),
    "BERT": (pretrain_bert, "--mask-prob 0.3 "),
    "T5": (T5, "--decoder-seq-length 16 --mask-prob 0.3 "),
}


def train(mesh: Mesh, name: str, flags: str, seen: list | None = None) -> tuple[list, dict]:
    """(reported losses of each step, of a validation before them). seen: gets the scores and labels of the first step."""
    script, own = SCRIPTS[name]
    with trainer_of(script, mesh, MODEL + own + flags, predicts=False) as trainer:
        losses_of = partial(
            partial, evaluate, trainer.pipeline, num_microbatches=4 // mesh.samples.size, first_sample=0
        )
        validation = losses_of(partial(trainer._iterators, "valid", trainer.datasets["valid"][0].samples))()
        steps = []
        trainer.log.add = lambda losses, is_nan=False, *, skipped=False: steps.append(dict(losses))
        if seen is not None:
            of_model = language_model.losses_and_cross_entropy

            def noted(scores, labels, *rest, **how):
                seen.append((scores.detach().clone(), labels.clone()))
                return of_model(scores, labels, *rest, **how)

            language_model.losses_and_cross_entropy = noted
        try:
            trainer._train()
        finally:
            if seen is not None:
                language_model.losses_and_cross_entropy = of_model
        return steps, validation


@cache
def one_process(name: str, flags: str = "") -> tuple[list, dict]:
    return run_ranks({}, partial(train, name=name, flags=flags))[0]


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(("smoothing", "z"), [(SMOOTHING, Z), (SMOOTHING, 0.0), (0.0, Z)])
def test_the_loss_of_a_line_is_torch_s_cross_entropy_and_the_objective_what_is_added_to_it(name, smoothing, z):
    seen, flags = [], f"--label-smoothing {smoothing} --z-loss-coeff {z} "
    steps, validation = run_ranks({}, partial(train, name=name, flags=flags, seen=seen))[0]
    scores = torch.cat([one.transpose(0, 1).flatten(0, 1) for one, _ in seen[:4]])[:, :WORDS]
    labels = torch.cat([one.t().flatten() for _, one in seen[:4]])
    scores, labels = scores[labels >= 0], labels[labels >= 0]
    plain = F.cross_entropy(scores, labels)
    smoothed = F.cross_entropy(scores, labels, label_smoothing=smoothing * WORDS / (WORDS - 1))
    objective = smoothed + z * scores.logsumexp(-1).square().mean()
    assert steps[0]["lm loss"] == pytest.approx(float(plain), rel=1e-12)
    assert steps[0]["lm objective"] == pytest.approx(float(objective), rel=1e-12)
    assert abs(objective - plain) > 1e-3
    without, expected = one_process(name)
    assert validation == expected and "lm objective" not in validation
    assert steps[0]["lm loss"] == pytest.approx(without[0]["lm loss"], rel=1e-12)
    assert [list(losses)[:2] for losses in steps] == [["lm loss", "lm objective"]] * 2
    assert all("lm objective" not in losses for losses in without)


TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
LAYOUTS = {
    "GPT tp-sp-pp-dp": ("GPT", {"tp": 2, "pp": 2, "dp": 2}, TP + PP + "--sequence-parallel "),
    "GPT cp-dp-zero3": ("GPT", {"cp": 2, "dp": 2}, "--context-parallel-size 2 --zero-stage 3 "),
    "GPT tp-sp in tiles": ("GPT", {"tp": 2}, TP + "--sequence-parallel --tiled-loss 2 "),
    "BERT tp-sp-dp-zero1": ("BERT", {"tp": 2, "dp": 2}, TP + "--sequence-parallel --use-distributed-optimizer "),
    "T5 tp-pp-cp": ("T5", {"tp": 2, "pp": 2, "cp": 2}, TP + PP + "--context-parallel-size 2 "),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reports_both_as_one_process(layout):
    name, sizes, flags = LAYOUTS[layout]
    steps, validation = run_ranks(sizes, partial(train, name=name, flags=TERMS + flags))[-1]
    expected_steps, expected = one_process(name, TERMS)
    for got, losses in zip(steps, expected_steps, strict=True):
        assert got == pytest.approx(losses, rel=1e-10)
    assert validation == pytest.approx(expected, rel=1e-10)


# ---------------------------------------------------------------- lines and files

RUN = "--global-batch-size 2 --train-iters 4 --eval-interval 2 --eval-iters 1 --init-method-std 0.3 "


def numbers(text: str, what: str) -> list[float]:
    return [float(number) for number in re.findall(rf"\| {what}: (\S+)", text)]


@pytest.mark.full
@pytest.mark.parametrize("script", [pretrain_gpt, pretrain_bert, pretrain_t5])
def test_the_lines_and_files_of_a_run_have_both(script, capsys, tmp_path):
    own = "--decoder-seq-length 8 --decoder-num-layers 1 " if script is pretrain_t5 else ""
    own += "--mask-prob 0.3 " if script is not pretrain_gpt else ""
    more = {"args_defaults": pretrain_t5.DEFAULTS} if script is pretrain_t5 else {}
    whole_run.run(f"{RUN}{own}{TERMS} --lr 1e-12 --metrics-file {tmp_path}/m", script=script, **more)
    text = capsys.readouterr().out
    whole_run.run(f"{RUN}{own} --lr 1e-12", script=script, **more)
    plain = capsys.readouterr().out
    assert len(numbers(text, "lm loss")) == 4
    assert numbers(text, "lm loss") == pytest.approx(numbers(plain, "lm loss"), rel=1e-6)
    both = zip(numbers(text, "lm objective"), numbers(text, "lm loss"), strict=True)
    assert all(objective > loss for objective, loss in both) and "objective" not in plain
    for what in ("lm loss value", "lm loss PPL"):
        assert len(numbers(text, what)) >= 3
        assert numbers(text, what) == pytest.approx(numbers(plain, what), rel=1e-6)
    records = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    intervals = [record for record in records if record["kind"] == "interval"]
    assert [record["lm loss"] for record in intervals] == pytest.approx(numbers(text, "lm loss"), rel=1e-6)
    assert [record["lm objective"] for record in intervals] == pytest.approx(numbers(text, "lm objective"), rel=1e-6)
    validations = [record for record in records if record["kind"] == "validation"]
    assert validations and not any("objective" in name for record in validations for name in record)


@pytest.mark.parametrize(("script", "tokens"), [(pretrain_gpt, 8), (pretrain_t5, 8 + 6)])
def test_the_tokens_of_a_second_are_those_of_every_stack(script, tokens: int, capsys, tmp_path):
    """By the time of an iteration in the same record; a T5's encoder reads 8 tokens of a sample, its decoder 6."""
    more, own = {}, "--log-throughput --log-interval 2 --train-iters 2 "
    if script is pretrain_t5:
        more, own = {"args_defaults": pretrain_t5.DEFAULTS}, own + "--decoder-seq-length 6 --decoder-num-layers 1 "
    files = f"--metrics-file {tmp_path}/m"
    whole_run.run(f"--global-batch-size 2 {own}{files}", script=script, **more)
    (record,) = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert record["tokens-per-second"] * record["iteration-time"] == pytest.approx(2 * tokens, rel=1e-6)
    (shown,) = re.findall(r"left, ([\d,]+) tokens/s", capsys.readouterr().out)
    assert float(shown.replace(",", "")) == pytest.approx(record["tokens-per-second"], abs=0.5)


# ---------------------------------------------------------------- where no token counts


def files(tmp_path, valid: list[int], train: list[int]) -> str:
    """Flags of a run whose loss leaves out what follows the token 31, the end of a document."""
    for name, text in (("train", train), ("valid", valid)):
        write(tmp_path / name, [[text]] * 4)
    return (
        f"--train-data-path {tmp_path}/train --valid-data-path {tmp_path}/valid --data-cache-path {tmp_path}/cache "
        "--eod-mask-loss "
    )


REAL = [word for word in whole_run.TINY if word != "--mock-data"]


def test_a_validation_without_a_token_that_counts_has_no_loss_and_no_perplexity(capsys, tmp_path):
    flags = f"{RUN}{files(tmp_path, [31] * 40, [1, 2, 3] * 30)} --metrics-file {tmp_path}/m "
    whole_run.run(flags + "--log-validation-ppl-to-tensorboard", tiny=REAL)
    text = capsys.readouterr().out
    assert "PPL" not in text and "lm loss value" not in text
    lines = [line for line in text.splitlines() if line.startswith(" validation loss at")]
    assert lines == [
        " validation loss at iteration 2 | no token counts for lm loss | ",
        " validation loss at iteration 4 on validation set | no token counts for lm loss | ",
    ]
    warned = [line for line in text.splitlines() if line.startswith("WARNING: validation at iteration")]
    assert len(warned) == 2 and all("no token counts for lm loss" in line for line in warned)
    records = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    of_validations = [record for record in records if record["kind"] == "validation"]
    assert len(of_validations) == 2 and not any("lm loss" in name for record in of_validations for name in record)
    assert len(numbers(text, "lm loss")) == 4


def test_a_step_without_a_token_that_counts_has_no_loss(capsys, tmp_path):
    """Not even in the mean over the steps of a line, and none where it is the only one."""
    whole_run.run(f"{RUN}{files(tmp_path, [1] * 40, [31] * 40)}", tiny=REAL)
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if re.search(r"\] iteration ", line)]
    assert len(lines) == 4 and not any("lm loss" in line for line in lines)
    assert all(math.isfinite(number) and number > 0 for number in numbers(text, "lm loss value"))


def test_a_line_s_mean_leaves_steps_out_that_counted_nothing(capsys):
    step = StepNumbers(4, 32, 8, 1e-3)
    for stop in (None, 1, 2, 3):
        log = TrainingLog(4, 4)
        for iteration, losses in enumerate(({}, {"lm loss": 2.0}, {}, {"lm loss": 4.0, "other": 1.0}), start=1):
            log.add(losses)
            if iteration == stop:
                state = json.loads(json.dumps(log.state()))
                log = TrainingLog(4, 4)
                log.load_state(state)
        assert log.line_if_due(step).losses == {"lm loss": 3.0, "other": 1.0}
        assert "lm loss: 3.000000E+00 | other: 1.000000E+00 |" in capsys.readouterr().out
    assert "lm loss" not in training_line(Interval(step, 4, 1.0, {}))


# ---------------------------------------------------------------- auxiliary losses


class PenalisedLayer(ParallelTransformerLayer):
    """Adds the root mean square of each sample's activations to the objective."""

    def __init__(self, config, layer, context):
        super().__init__(config, layer, context)
        self.number, self.context = layer + 1, context

    def forward(self, x, *rest):
        numel = self.context.sum_over_sample(torch.full((), float(x[:, 0].numel()), dtype=x.dtype, device=x.device))
        squares = self.context.sum_over_sample(x.square().sum((0, 2)))  # [b]
        self.context.aux_losses.add("activation size", self.number, (squares / numel).sqrt(), 0.5)
        return super().forward(x, *rest)


class MaskedSamples:
    """A data set whose samples have masks of their own."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        row = dict(self.samples[index])
        row["loss_mask"] = np.where(np.arange(16) % (index % 3 + 2) == 0, 0.0, 1.0).astype(np.float32)
        return row


def penalised_model(*stage, **chunk):
    runtime = get_runtime()
    parts = runtime.model_parts(*stage, **chunk)
    parts["context"].aux_losses.declare("activation size")
    return GPTModel(runtime.config.transformer, **parts, make_layer=PenalisedLayer)


def masked_sets(num_samples):
    return tuple(MaskedSamples(split) for split in pretrain_gpt.train_valid_test_datasets_provider(num_samples))


PENALISED = SimpleNamespace(
    **vars(pretrain_gpt) | {"model_provider": penalised_model, "train_valid_test_datasets_provider": masked_sets}
)


def train_penalised(mesh: Mesh, flags: str, script: SimpleNamespace = PENALISED) -> tuple[list, list, list]:
    """(losses of each step, those that the writers get, tokens weighed and counted)."""
    steps, curves, tokens = [], [], []
    with trainer_of(script, mesh, MODEL + flags) as trainer:
        report, watched = trainer._report, trainer.watch.report

        def note_result(result, *rest, **options):
            steps.append(result.losses)
            tokens.append((result.weighed_tokens, result.tokens))
            report(result, *rest, **options)

        def note_curves(step, losses, *rest, **options):
            curves.append({**losses, **options["of_layers"]})
            watched(step, losses, *rest, **options)

        trainer._report, trainer.watch.report = note_result, note_curves
        trainer._train()
    return steps, curves, tokens


def test_auxiliary_losses_are_reported_by_name_and_where_asked_by_layer(tmp_path: Path):
    flags = f"--moe-per-layer-logging --metrics-file {tmp_path}/metrics.jsonl --log-interval 1"
    ((steps, curves, tokens),) = run_ranks({}, partial(train_penalised, flags=flags))
    layers = ["moe/activation size_layer_0", "moe/activation size_layer_1"]
    for losses, points in zip(steps, curves, strict=True):
        assert set(losses) == {"lm loss", "activation size"} and set(points) == {*losses, *layers}
        assert losses["activation size"] == pytest.approx(sum(points[name] for name in layers) / 2, rel=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    written = [line for line in lines if line["kind"] == "interval"]
    assert len(written) == len(curves)
    for line, points in zip(written, curves):
        assert {name: line[name] for name in layers} == {name: points[name] for name in layers}
    assert all(weighed == counted < 8 * 16 for weighed, counted in tokens)
    sizes, flags = {"tp": 2, "pp": 2, "dp": 2}, "--sequence-parallel --recompute-activations --rerun-mode disabled"
    flags += " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    ranks = run_ranks(sizes, partial(train_penalised, flags=flags))
    assert ranks[0][0] == [{}, {}], "a rank of the first stage knows no losses"
    for found, wanted in zip(ranks[-1][0], steps, strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)
    assert ranks[0][2] == tokens


def test_a_loss_func_that_counts_other_tokens_than_its_batches_have_is_named_once(capsys):
    def forward_step(data_iterator, model):
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        return output, lambda losses: (loss_func(losses)[0], 3.0, {})

    script = SimpleNamespace(**vars(PENALISED) | {"forward_step": forward_step})
    run_ranks({}, partial(train_penalised, flags="", script=script))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "auxiliary losses" in line]
    assert tells(line, "WARNING loss_mask num_tokens") and "counted 12," in line  # 4 microbatches of a step
