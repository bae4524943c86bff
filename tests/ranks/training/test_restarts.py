"""Runs that stop and go on, from the command line to the last line printed: whole runs of one rank, within this process."""

import fcntl
import json
import os
import re
import resource
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from said import tells
from whole_run import run

import pretrain_bert
import pretrain_gpt
from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.models.common.model_rules import GPT_RULES
from megatron.core.storage import file_layer
from megatron.core.storage.file_layer import LocalFiles
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.initialize import parse_and_check_settings


def rates(text: str) -> dict[int, float]:
    """The rate of the step after each iteration."""
    return {int(i): float(rate) for i, rate in re.findall(r"iteration +(\d+)/.*?learning rate: (\S+)", text)}


# ---------------------------------------------------------------- another batch


@pytest.mark.full
@pytest.mark.parametrize(
    "before, after", [("", "--global-batch-size 2"), ("--global-batch-size 4", ""), ("--micro-batch-size 3", "")]
)
def test_the_rate_follows_the_iterations_when_the_batch_changes(before: str, after: str, said, tmp_path):
    """Half of a linear decay done with one batch is half of it with another. The rate falls by 0.01 each iteration."""
    both = f"--train-iters 10 --save {tmp_path} --load {tmp_path}"
    said(f"{both} --exit-interval 5 {before}")
    text = said(f"{both} {after}")
    assert rates(text) == pytest.approx({i: 0.1 - 0.01 * i for i in range(6, 11)})
    sizes = [int(size) for size in re.findall(r"global batch size: +(\d+)", text)]
    old = {"": 1, "--global-batch-size 4": 4, "--micro-batch-size 3": 3}[before]
    assert tells(text, f"global_batch_size {old} {sizes[0]}")
    assert re.findall(r"consumed samples: +(\d+)", text)[-1] == str(5 * old + 5 * sizes[0])


def test_an_older_checkpoint_counts_its_iterations_by_their_batch():
    state = TrainState.from_json({"iteration": 5, "consumed_train_samples": 20, "scheduled_train_samples": 16})
    assert (state.samples_per_iter, state.scheduled_train_samples) == (4, 16)


# ---------------------------------------------------------------- how much is read


class Numbers:
    """A user's own data set of a fixed size, which notes what is read of it."""

    def __init__(self, size: int):
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        assert 0 <= i < self.size
        self.read.append(i)
        text = np.arange(i, i + 9) % 31
        positions = np.arange(8)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": np.ones(8, np.float32), "position_ids": positions}


@pytest.mark.full
def test_a_smaller_batch_goes_on_after_the_last_sample_read(said, tmp_path):
    both = f"--train-iters 6 --save {tmp_path} --load {tmp_path} --num-workers 0"  # nothing is read ahead
    asked, data = [], Numbers(100)

    def provide(counts: list[int]) -> tuple:
        asked.append(counts[0])
        return data, None, None

    said(f"{both} --exit-interval 3 --global-batch-size 4", datasets=provide)
    said(f"{both} --exit-interval 4 --global-batch-size 2", datasets=provide)
    text = said(f"{both} --global-batch-size 10", datasets=provide)
    assert data.read == list(range(3 * 4 + 2 + 2 * 10))
    assert asked == [24, 24, 34], "no fewer than before, so that a shuffled data set keeps its order"
    assert any(tells(line, "34 24") for line in text.splitlines())


@pytest.mark.full
def test_a_finished_run_says_so_and_evaluates(said, tmp_path):
    """Also if it is asked for fewer iterations than it has done: validations then read what the run's last one read."""
    data, flags = Numbers(60), f"--eval-iters 2 --eval-interval 2 --save {tmp_path} --load {tmp_path}"
    provide = lambda counts: (data, data, data)  # noqa: E731
    first = said(f"{flags} --train-iters 6", datasets=provide)
    validated = [line for line in first.splitlines() if "validation loss" in line]
    assert [line.split("|")[0].strip() for line in validated] == [
        "validation loss at iteration 2",
        "validation loss at iteration 4",
        "validation loss at iteration 6 on validation set",
        "validation loss at iteration 6 on test set",
    ]
    for train_iters in (6, 3):
        again = said(f"{flags} --train-iters {train_iters}", datasets=provide)
        (line,) = (line for line in again.splitlines() if line.startswith("nothing left to train: "))
        assert "iteration 6" in line and f" {train_iters}" in line and "--train-iters" in line
        assert [line for line in again.splitlines() if "validation loss" in line] == validated[-2:]


SHORT = {"training": ((7, 99, 99), "", "7 4 8 --train-iters"), "no training data": ((None, 99, 99), "", "4 --split 0")}


@pytest.mark.parametrize("sizes, flags, message", SHORT.values(), ids=SHORT)
def test_a_set_that_is_too_short_is_refused_at_the_start(sizes, flags, message, refused):
    sets = tuple(size and Numbers(size) for size in sizes)
    said = refused(f"--train-iters 4 --global-batch-size 2 {flags}", datasets=lambda counts: sets)
    assert tells(said, message) and "1 problem(s)" in said


def test_sets_that_are_just_long_enough_are_read_to_the_end(said):
    sets = tuple(Numbers(size) for size in (8, 8, 4))
    said("--train-iters 4 --global-batch-size 2 --eval-iters 2 --eval-interval 2", datasets=lambda counts: sets)
    assert [sorted(set(data.read)) for data in sets] == [list(range(8)), list(range(8)), list(range(4))]


@pytest.mark.full
def test_what_is_consumed_counts_among_what_is_needed(said, refused, tmp_path):
    both = f"--train-iters 6 --save {tmp_path} --load {tmp_path}"
    provide = lambda counts: (Numbers(12), None, None)  # noqa: E731
    said(f"{both} --exit-interval 3 --global-batch-size 2", datasets=provide)
    message = refused(f"{both} --global-batch-size 3", datasets=provide)
    assert tells(message, "12 3 9 6 15")


@pytest.mark.full
@pytest.mark.parametrize(
    "returned, given", [((None, None), "2 of them"), (None, "NoneType"), ([None] * 4, "4 of them")]
)
def test_a_provider_must_return_three_sets(returned, given, refused):
    message = refused("--train-iters 1", datasets=lambda counts: returned)
    assert tells(message, f"{given}")


def test_a_huge_batch_is_refused_without_making_its_schedule(refused):
    """Its 10^15 actions would not fit; counting them takes no time."""
    message = refused("--train-iters 1 --global-batch-size 500000000000000")
    assert tells(message, "--global-batch-size 500000000000000 500,000,000,000,000")
    assert tells(message, "1,000,000")


# ---------------------------------------------------------------- exact, whatever the numbers


@pytest.mark.full
def test_a_run_of_nan_losses_is_saved_within_an_interval_and_goes_on(said, tmp_path):
    """A rate of 1e30 makes every loss after the first NaN or infinite."""
    flags = "--train-iters 6 --log-interval 4 --lr 1e30 --no-check-for-nan-in-loss-and-grad --seed 5"
    whole = said(flags)
    first = said(f"{flags} --exit-interval 3 --save {tmp_path}")
    second = said(f"{flags} --load {tmp_path} --train-iters 6")
    untimed = [
        [re.sub(r"\[.*?\]|\(ms\): \S+", "", line) for line in text.splitlines() if "consumed" in line]
        for text in (whole, first + second)
    ]
    assert "NAN" in untimed[0][0] and untimed[0] == untimed[1]


def saved(root: Path, iteration: int, prefix: str) -> dict[str, list[str]]:
    """Hashes of the tensors of one kind in a checkpoint, by parameter: equal bits, equal hashes."""
    tensors = json.loads((root / f"iter_{iteration:07d}" / "manifest.json").read_text())["tensors"]
    return {
        name.removeprefix(prefix): [piece["sha256"] for piece in record["pieces"]]
        for name, record in tensors.items()
        if name.startswith(prefix)
    }


@pytest.mark.full
@pytest.mark.parametrize("how", ["", "--no-load-optim", "--finetune"])
def test_a_half_precision_run_goes_on_from_the_exact_float32_weights(how: str, said, tmp_path):
    """One step at a rate that moves no float32 weight, from 2 float32 steps: the masters are those weights to the bit."""
    said(f"--train-iters 2 --save {tmp_path}/single")
    said(
        f"--train-iters {1 if how == '--finetune' else 3} --lr 1e-30 --bf16 --allow-precision-change --override-opt_param-scheduler --load {tmp_path}/single --save {tmp_path}/half {how}"
    )
    weights = saved(tmp_path / "single", 2, "model/")
    masters = saved(tmp_path / "half", 1 if how == "--finetune" else 3, "optimizer/master/")
    not_zero = [name for name in weights if not name.endswith("bias")]  # a bias of zero moves by 1e-30
    assert not_zero and {n: masters[n] for n in not_zero} == {n: weights[n] for n in not_zero}


# ---------------------------------------------------------------- what --load may name


def mistaken(root: Path, what: str) -> Path:
    """A copy of the folder `root` in which something is not as --load needs it; returns what to load."""
    latest = root / "latest_checkpointed_iteration.txt"
    if what == "no latest":
        latest.unlink()
    elif what == "something else":
        shutil.rmtree(root)
        root.mkdir()
        (root / "notes.txt").write_text("none of ours")
    elif what == "a missing iteration":
        return root / "iter_0000100"
    elif what == "a name too long":
        return root / ("a" * 300)
    return {"a file": latest, "an iteration": root / "iter_0000002", "a missing folder": root / "bokks"}.get(what, root)


MISTAKES = {
    "a file": ("", "--save {root}"),
    "an iteration": ("", "--load {root}"),
    "a missing iteration": ("", "--save {root}"),
    "no latest": ("", "2 4 {root}/latest_checkpointed_iteration.txt"),
    "something else": ("", "latest_checkpointed_iteration.txt notes.txt"),
    "a missing folder": ("--finetune", "--finetune"),
    "a missing folder, nothing else": ("", "--load {root}/bokks --save"),
    "a missing folder, another save": ("--save {root}/new", "--load {root}/bokks"),
    "a missing folder, other weights": ("--pretrained-checkpoint {root}", "--load {root}/bokks"),
    "a name too long": ("", "--load"),
    "a missing folder, exit": ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", MISTAKES)
def test_a_load_that_is_a_mistake_is_refused_with_what_is_there(what: str, checkpoints, refused, tmp_path):
    flags, texts = MISTAKES[what]
    shutil.copytree(checkpoints, tmp_path / "books")
    load = mistaken(tmp_path / "books", what.split(",")[0])
    message = refused(f"--train-iters 6 --load {load} {flags.format(root=tmp_path / 'books')}")
    assert tells(message, texts.format(root=tmp_path / "books"))
    assert not (tmp_path / "books" / "new").exists(), "a run that is refused made its --save folder"


@pytest.mark.parametrize("flag", ["--save", "--load"])
def test_an_empty_folder_name_is_refused(flag: str, refused):
    assert tells(refused(f"--train-iters 1 {flag} ''"), f"{flag}")


@pytest.mark.full
@pytest.mark.parametrize(
    "load, save",
    [
        ("new", "new"),
        ("new/", "./new"),
        ("link/new", "new"),
        ("link/new", "x/../new"),
        ("gone", "new"),
        ("empty", None),
        ("empty", "new"),
        ("notes", "notes"),
    ],
)
def test_a_folder_without_a_checkpoint_yet_starts_anew_and_says_so(load: str, save, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/todo.txt").write_text("a folder that --save names may hold more")
    Path("link").symlink_to(".")
    Path("gone").symlink_to("new")
    text = said(f"--train-iters 1 --load {load}" + (f" --save {save}" if save else ""))
    assert text.count(f"no checkpoint in {load}: starting from initial weights") == 1


@pytest.mark.full
@pytest.mark.parametrize("save", [True, False], ids=["--save on it", "--load alone"])
def test_a_pointer_to_an_older_iteration_is_followed_with_a_warning(save: bool, checkpoints, said, tmp_path):
    """One flipped bit makes a 6 of a 4; and whoever goes back by hand is told as well."""
    root = tmp_path / "books"
    shutil.copytree(checkpoints, root)
    flags = f"--train-iters 4 --load {root}" + (f" --save {root}" if save else "")
    assert "WARNING" not in said(flags)
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    text = said(flags)
    (warning,) = [line for line in text.splitlines() if line.startswith("WARNING")]
    assert "iteration 2" in warning and "iteration 4" in warning and str(root) in warning
    assert sorted(rates(text)) == [3, 4]


class Killed(BaseException):
    """The process ends here: nothing that catches an Exception runs."""


LATEST = "latest_checkpointed_iteration.txt"
FULL = OSError(28, "No space left on device")
ENDS = {
    "killed as the folder is renamed": ("rename", "iter_0000001.partial", Killed()),
    "killed as the pointer is opened": ("open", f"{LATEST}.partial", Killed()),
    "killed as the pointer is renamed": ("rename", f"{LATEST}.partial", Killed()),
    "no room for the pointer": ("open", f"{LATEST}.partial", FULL),
    "no rename of the pointer": ("rename", f"{LATEST}.partial", FULL),
    "killed as a later folder is renamed": ("rename", "iter_0000002.partial", Killed()),
    "killed as a later pointer is renamed": ("rename", f"{LATEST}.partial", Killed()),
}


@pytest.mark.full
@pytest.mark.parametrize("how", ENDS)
def test_the_same_command_goes_on_after_a_save_that_did_not_end(how, checkpoints, said, capsys, monkeypatch, tmp_path):
    """And ends as a run that was not stopped, to the bit."""
    name, path, error = ENDS[how]
    function, command = (
        getattr(LocalFiles, name),
        f"--train-iters 4 --save-interval 1 --save {tmp_path} --load {tmp_path}",
    )
    at = 2 if how == "killed as a later pointer is renamed" else 1
    calls = []

    def ends(disk, first, *rest):
        calls.extend([first] if first == tmp_path / path else [])
        if len(calls) == at:
            raise error
        return function(disk, first, *rest)

    with monkeypatch.context() as patch, pytest.raises((Killed, SystemExit)) as stopped:
        patch.setattr(LocalFiles, name, ends)
        run(command)
    parallel_state.stop_distributed()  # as at the end of the process
    told = capsys.readouterr().err
    assert stopped.type is Killed or (stopped.value.code == 1 and "No space left on device" in told)
    said(command)
    assert {path.name for path in tmp_path.iterdir()} == {LATEST, *(f"iter_{n:07d}" for n in range(1, 5))}
    assert saved(tmp_path, 4, "") == saved(checkpoints, 4, "")


@pytest.mark.full
def test_a_folder_that_cannot_be_removed_does_not_end_the_run_and_goes_with_the_next_start(said, monkeypatch, tmp_path):
    def busy(folder, *rest, **more):
        raise OSError(16, "Device or resource busy")

    flags = f"--train-iters 2 --save-interval 1 --save {tmp_path}"
    said(flags)
    with monkeypatch.context() as patch:
        patch.setattr(file_layer, "remove_tree", busy)
        text = said(flags)
    assert sorted(rates(text)) == [1, 2]
    assert any(line.startswith("WARNING") and "iter_0000001.replaced" in line for line in text.splitlines())
    assert list(tmp_path.glob("*.replaced"))
    assert "WARNING" not in said(f"{flags} --load {tmp_path}") and not list(tmp_path.glob("*.replaced"))


# ---------------------------------------------------------------- all problems together


def refusal(flags: str, **defaults: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_and_check_settings(None, defaults, shlex.split(flags), GPT_RULES)
    return caught.value.problems


BARE = "--num-layers 1 --hidden-size 8 --num-attention-heads 1"


def test_a_missing_tokenizer_hides_nothing_and_blames_no_default():
    problems = refusal(BARE, tokenizer_type="GPT2BPETokenizer")
    for flag in ("--micro-batch-size", "--train-iters", "--seq-length", "--lr", "--tokenizer-type"):
        assert sum(problem.startswith(f"{flag} ") and "is required" in problem for problem in problems) == 1
    assert not any("GPT2BPETokenizer" in problem for problem in problems)


def test_half_a_tokenizer_is_told_what_it_lacks_beside_the_other_problems():
    problems = refusal(f"{BARE} --vocab-file vocab.json --lr -1", tokenizer_type="GPT2BPETokenizer")
    assert tells(problems, "--tokenizer-type GPT2BPETokenizer --merge-file")
    assert tells(problems, "--lr -1.0")
    assert tells(problems, "--micro-batch-size") and tells(problems, "--seq-length")
    assert "--lr is required" not in problems, "a component that could not be built is not asked again"


@pytest.mark.full
@pytest.mark.parametrize("interval, lines, is_told", [(2, 1, False), (3, 0, True)])
def test_a_run_that_will_print_no_training_line_says_so(said, interval, lines, is_told):
    text = said(f"--train-iters 2 --log-interval {interval}")
    assert text.count("consumed samples") == lines
    assert (f"--log-interval {interval}" in text) == is_told


@pytest.mark.full
def test_a_checkpoint_of_another_kind_of_model_is_refused(tmp_path, capsys):
    """Between models whose settings are the same, by their names; without its head a BERT is one too."""
    flags = "--seq-length 16 --train-iters 1 "
    for saved, script, other, more, said in (
        ("bert", pretrain_bert, pretrain_gpt, "", "the checkpoint has a BertModel, this run a GPTModel"),
        (
            "bert",
            pretrain_bert,
            pretrain_bert,
            "--bert-no-binary-head ",
            "binary_head.bias, binary_head.weight, language_model",
        ),
        ("gpt", pretrain_gpt, pretrain_bert, "", "the checkpoint has a GPTModel, this run a BertModel"),
    ):
        if not (tmp_path / saved).exists():
            run(f"{flags} --save {tmp_path / saved}", script=script)
        with pytest.raises(SystemExit):
            run(f"{flags} {more} --load {tmp_path / saved}", script=other)
        assert said in (text := capsys.readouterr().err) and text.startswith("cannot start, 1 problem(s):")
        assert not more or "parameters" in text


@pytest.mark.full
def test_a_run_that_will_replace_checkpoints_of_another_is_warned(tmp_path, said):
    flags = f"--train-iters 3 --exit-interval 2 --save {tmp_path}/a --save-interval 1"
    assert "WARNING" not in said(flags)
    lines = [line for line in said(flags).splitlines() if line.startswith("WARNING")]
    assert len(lines) == 1 and f"--save {tmp_path}/a" in lines[0] and f"give --load {tmp_path}/a" in lines[0]
    assert "WARNING" not in said(f"{flags} --load {tmp_path}/a")
    said(f"--train-iters 3 --exit-interval 1 --save {tmp_path}/b")
    lines = [line for line in said(f"{flags} --load {tmp_path}/b").splitlines() if line.startswith("WARNING")]
    assert len(lines) == 1 and f"--save {tmp_path}/a" in lines[0] and "iteration 3" in lines[0]


@pytest.mark.full
def test_two_runs_do_not_save_into_one_folder_at_a_time(tmp_path, refused, said):
    """A lock of ours stands for the other run's: it is refused while a run lives, and refuses one."""
    flags, ours = f"--train-iters 1 --save {tmp_path}", os.open(tmp_path, os.O_RDONLY)

    def data_while_it_lives(sizes):
        with pytest.raises(BlockingIOError):
            fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return pretrain_gpt.train_valid_test_datasets_provider(sizes)

    run(flags, data_while_it_lives)
    fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert tells(refused(flags), f"--save {tmp_path}")
    os.close(ours)
    assert "saved checkpoint" in said(flags)


def test_a_disk_that_is_full_in_the_middle_of_a_run_is_said_without_a_stack_of_calls(tmp_path, capsys):
    """A limit on the size of files stands for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(SystemExit) as stop:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
            run(f"--train-iters 1 --save {tmp_path}")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 1
    *without, line = capsys.readouterr().err.splitlines()
    assert all(
        "the run goes on without it" in one for one in without
    )  # the limit holds for the page of a rank's status too
    assert tells(line, f"{tmp_path}/iter_0000001.partial/rank_00000.bin")
    assert not list(tmp_path.iterdir())
