"""--full-validation and --multiple-validation-sets: every sample once, in any layout, each set by its name.

The oracle takes the samples of a set one by one, in one process and float64, so a layout may differ from it by rounding alone.
"""

import itertools
import json
import re
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from local_ranks import run_ranks
from said import tells
from script_run import trainer_of
from token_files import write
from whole_run import TINY as MOCK

import pretrain_bert
import pretrain_gpt
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.datasets import DataConfig
from megatron.core.parallel.mesh import Mesh
from megatron.training.arguments.config import TrainingConfig
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.named_and_padded_validation_sets import PaddedSet, evaluated_sets
from megatron.training.num_samples import samples_to_request

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --fp64 --micro-batch-size 2 --lr 1e-2 "
    "--make-vocab-size-divisible-by 8 --device cpu --num-workers 0 --global-batch-size 24 --train-iters 4 "
    "--tokenizer-type NullTokenizer --vocab-size 60 --eod-mask-loss --eval-interval 3 --eval-iters 1 "
)
FULL, SEVERAL = "--full-validation ", "--multiple-validation-sets "
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
LAYOUTS = {
    "dp2": ({"dp": 2}, ""),
    "dp3": ({"dp": 3}, ""),
    "dp4-zero3": ({"dp": 4}, "--zero-stage 3 "),
    "dp2-pp2": ({"dp": 2, "pp": 2}, PP),
    "dp2-vpp": ({"dp": 2, "pp": 2}, PP + "--num-layers-per-virtual-pipeline-stage 1 "),
    "dp2-tp2-sp": ({"dp": 2, "tp": 2}, TP + "--sequence-parallel "),
    "dp2-cp2": ({"dp": 2, "cp": 2}, "--context-parallel-size 2 "),
}


@cache
def files() -> Path:
    """Three token files of documents of other lengths, which end with 59: they give 37, 5 and 24 samples of 8 tokens."""
    folder, generator = Path(mkdtemp(prefix="sets-")), torch.Generator().manual_seed(3)
    for name, tokens in (("train", 900), ("wiki", 8 * 37 + 3), ("code", 8 * 5 + 2), ("books", 8 * 24 + 1)):
        text = torch.randint(0, 59, (tokens,), generator=generator).tolist()
        cuts = [*range(0, tokens, 17), tokens]
        write(folder / name, [[[*text[a : b - 1], 59]] for a, b in itertools.pairwise(cuts)])
    return folder


def data(*valid: str) -> str:
    paths = " ".join(str(files() / name) for name in valid)
    return f"--train-data-path {files()}/train --valid-data-path {paths} --data-cache-path {files()}/cache "


def evaluated(mesh: Mesh, flags: str) -> tuple[list[tuple[str, dict[str, float]]], list]:
    """(name and losses of each set that a validation evaluates, on the rank that knows them; the samples read, by number)."""
    with trainer_of(pretrain_gpt, mesh, MODEL + flags, predicts=False) as trainer:
        said, read = [], []
        trainer.watch.report_validation = lambda what, losses, *, at_end: said.append((what, losses))
        for of in trainer.datasets["valid"]:
            of.samples.samples = Counting(of.samples.samples, of.name, read)
        trainer._validate("valid", at_end=False)
        return said, read


class Counting:
    """Samples that write down which of them are read."""

    def __init__(self, samples, name, read):
        self.samples, self.name, self.read = samples, name, read

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.read.append((self.name, i))
        return self.samples[i]


def one_by_one(mesh: Mesh, flags: str) -> dict[str, float]:
    """The mean loss of each set, its samples taken one at a time through the model."""
    with trainer_of(pretrain_gpt, mesh, MODEL + flags, predicts=False) as trainer:
        (model,) = trainer.model
        model.eval()
        means = {}
        for of in trainer.datasets["valid"]:
            total = count = 0.0
            for i in range(len(of.samples.samples)):
                item = {name: torch.from_numpy(x)[None] for name, x in of.samples.samples[i].items()}
                with torch.no_grad():
                    losses = model(item["tokens"], item["position_ids"], None, labels=item["labels"])
                total += float((losses * item["loss_mask"]).sum())
                count += float(item["loss_mask"].sum())
            means[of.name] = total / count
        return means


@cache
def right(flags: str) -> dict[str, float]:
    return run_ranks({}, partial(one_by_one, flags=flags))[0]


FAST = ("dp2-pp2",)


MORE = ("dp3", "dp2-vpp")  # in the rest of the command; the others are for -m sweep


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.full if name in MORE else pytest.mark.sweep)
        for name in LAYOUTS
    ],
)
def test_every_layout_reads_each_sample_once_and_has_the_loss_of_a_plain_loop(layout):
    """37, 5 and 24 samples are no multiples of a global batch of 24, nor of microbatches of 2 on 2, 3 or 4 ranks."""
    flags, (sizes, of_layout) = data("wiki", "code", "books") + FULL + SEVERAL, LAYOUTS[layout]
    ranks = run_ranks(sizes, partial(evaluated, flags=flags + of_layout))
    expected = right(flags)
    assert list(expected) == ["validation-0", "validation-1", "validation-2"]
    (said,) = {json.dumps(said) for said, _ in ranks if said and said[0][1]}
    for name, losses in json.loads(said):
        assert losses["lm loss"] == pytest.approx(expected[name], rel=1e-13)
    copies = len(ranks) // sizes["dp"] // sizes.get("tp", 1)
    numbers = sorted(number for _, read in ranks for number in read if number[1] != 0)
    every = [(f"validation-{k}", i) for k, count in enumerate((37, 5, 24)) for i in range(1, count)]
    readers = {number: numbers.count(number) for number in set(numbers)}
    assert sorted(readers) == every and set(readers.values()) <= {1, copies}


@pytest.mark.full
def test_a_whole_set_is_one_epoch_of_its_file_and_an_unweighted_blend_all_of_them():
    for names, expected in ((("wiki",), 37), (("wiki", "code", "books"), 66)):
        flags = data(*names) + FULL
        said, read = run_ranks({}, partial(evaluated, flags=flags))[0]
        assert [name for name, _ in said] == ["validation"]
        assert sorted(i for _, i in read) == [*[0] * (-expected % 2), *range(expected)]
        assert said[0][1]["lm loss"] == pytest.approx(right(flags)["validation"], rel=1e-13)


# ---------------------------------------------------------------- whole runs

TINY = "--global-batch-size 4 --eval-interval 2 --log-interval 1 --seq-length 8 --tokenizer-type NullTokenizer --vocab-size 60 "


def lines_of(text: str) -> list[str]:
    return [line.strip(" |") for line in text.splitlines() if "validation" in line and "loss at" in line]


@pytest.fixture
def real():
    return [word for word in MOCK if word != "--mock-data"]


@pytest.mark.full
def test_a_resumed_run_logs_each_set_by_name_as_the_uninterrupted_one(real, said, tmp_path):
    """With a ramp of the batch size, the sets' names, and a stop between two validations."""
    flags = TINY + data("wiki", "code") + FULL + SEVERAL + "--validation-set-names wiki code --eval-iters 2 "
    flags += f"--train-samples 24 --rampup-batch-size 2 2 8 --metrics-file {tmp_path}/metrics "
    whole = said(flags, tiny=real)
    names = [re.match(r"validation-(\w+) loss at iteration (\d+)", line).groups() for line in lines_of(whole)]
    iterations = sorted({int(number) for _, number in names})
    assert names[:4] == [("wiki", "2"), ("code", "2"), ("wiki", "4"), ("code", "4")] and len(names) == 2 * len(
        iterations
    )
    assert f"validation-wiki: 37 samples {files()}/wiki" in whole
    records = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "validation"]
    assert [record["split"] for record in records] == [f"validation-{name}" for name, _ in names]
    assert "lm loss validation-wiki" in records[0]
    stop = f"--save {tmp_path}/saved --load {tmp_path}/saved "
    first = said(flags.replace("/metrics", "/m2") + stop + "--exit-interval 3", tiny=real)
    second = said(flags.replace("/metrics", "/m2") + stop, tiny=real)
    assert lines_of(first) + lines_of(second) == lines_of(whole)


@pytest.mark.full
def test_several_sets_without_reading_them_whole_have_windows_of_their_own(real, said):
    flags = TINY + data("wiki", "books") + SEVERAL + "--train-iters 4 --eval-iters 2 "
    several = lines_of(said(flags, tiny=real))
    alone = [
        lines_of(said(TINY + data(name) + "--train-iters 4 --eval-iters 2 ", tiny=real)) for name in ("wiki", "books")
    ]
    for k, lines in enumerate(alone):
        assert [line.replace(f"validation-{k} loss", "validation loss") for line in several[k::2]] == lines


@pytest.mark.full
def test_made_up_data_are_read_whole_for_as_many_batches(said):
    text = said("--train-iters 4 --global-batch-size 3 --eval-interval 2 --eval-iters 2 --full-validation")
    starts = [line.split(" | ")[0] for line in lines_of(text)]
    of_end = "validation loss at iteration 4 on"
    assert starts == ["validation loss at iteration 2", f"{of_end} validation set", f"{of_end} test set"]
    config = DataConfig(mock_data=True, full_validation=True)
    training = TrainingConfig(eval_iters=5)
    assert samples_to_request(training, config, 4, (5, 3), TrainState())[1] == 15
    assert samples_to_request(training, DataConfig(full_validation=True), 4, (5, 3), TrainState())[1] is None


REFUSED = {
    "weights": ("{several} 0.5 {a} 0.5 {b} {on}", "--multiple-validation-sets 0.5"),
    "weights, read whole": ("{several} 0.5 {a} 0.5 {b} --full-validation", "--full-validation --valid-data-path"),
    "names, not as many": ("{several} {a} {b} {on} --validation-set-names one", "--validation-set-names 1 2"),
    "names, twice": ("{several} {a} {b} {on} --validation-set-names one one", "--validation-set-names one"),
    "names alone": ("{several} {a} --validation-set-names one", "--validation-set-names --multiple-validation-sets"),
    "no files of its own": ("--data-path {a} {on}", "--multiple-validation-sets --valid-data-path"),
    "external": ("{several} {a} --full-validation --dataloader-type external", "--full-validation --dataloader-type"),
    "made up, no batches": ("--mock-data --full-validation --eval-iters 0", "--full-validation --eval-iters 0"),
    "made up, several": ("--mock-data {on}", "--multiple-validation-sets --valid-data-path"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", REFUSED)
def test_what_contradicts_itself_is_refused_by_name(what, real, refused):
    flags, facts = REFUSED[what]
    places = {"several": f"--train-data-path {files()}/train --valid-data-path", "on": "--multiple-validation-sets"}
    text = flags.format(a=files() / "wiki", b=files() / "code", **places)
    assert tells(refused(TINY + "--train-iters 2 --global-batch-size 4 " + text, tiny=real), facts)


@pytest.mark.full
def test_bert_with_the_order_of_sentences_is_refused(refused):
    flags = "--train-iters 2 --eval-iters 1 --full-validation"
    assert tells(refused(flags, script=pretrain_bert), "--full-validation --bert-no-binary-head")


# ---------------------------------------------------------------- the rows that count nothing


def test_a_set_is_filled_up_with_rows_that_count_nothing():
    samples = [{"tokens": torch.tensor([i]), "loss_mask": torch.ones(1)} for i in range(5)]
    filled = PaddedSet(samples, 4)
    assert [int(filled[i]["tokens"]) for i in range(len(filled))] == [0, 1, 2, 3, 4, 0, 0, 0]
    assert [float(filled[i]["loss_mask"]) for i in range(len(filled))] == [1.0] * 5 + [0.0] * 3
    assert float(samples[0]["loss_mask"]) == 1 and not PaddedSet(samples, 5).has_empty_rows


def test_samples_without_a_mask_are_refused_only_where_rows_are_filled_up():
    bare, whole = [{"tokens": i} for i in range(5)], DataConfig(full_validation=True)
    (of,) = evaluated_sets("valid", bare, whole, 5)
    assert of.name == "validation" and len(of.samples) == 5
    with pytest.raises(ConfigError, match=r"--full-validation.*5 samples.*loss_mask"):
        evaluated_sets("valid", bare, whole, 2)
    with pytest.raises(ConfigError, match="no samples"):
        evaluated_sets("valid", [], whole, 2)


@pytest.mark.full
def test_a_loss_function_that_reports_means_is_refused(said, capsys):
    def forward_step(data_iterator, model):
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)

        def mean(losses):
            loss, tokens, _ = loss_func(losses)
            return loss, tokens, {"lm loss": loss / tokens}

        return output, mean

    def five(sizes):
        return pretrain_gpt.train_valid_test_datasets_provider([sizes[0], 5, 0])

    flags = (
        "--train-iters 2 --global-batch-size 6 --eval-interval 1 --eval-iters 1 --full-validation --micro-batch-size "
    )
    options = {"forward_step": forward_step, "datasets": five}
    assert len(lines_of(said(flags + "1", **options))) == 2  # whole microbatches: nothing is filled up
    with pytest.raises(SystemExit):
        said(flags + "3", **options)
    assert "--full-validation" in (told := capsys.readouterr().err) and "'lm loss'" in told
