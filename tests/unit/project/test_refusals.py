"""Bad input of every kind that is decided before processes communicate: what was given, what is allowed, what to change."""

import runpy
import shlex
import sys
from pathlib import Path

import pretrain_t5
import pytest
import torch
from local_ranks import run_ranks
from processes import free_port
from refusals import BASE, BERT_REFUSALS, MOCK, ONE_STACK, REAL, REFUSALS, T5_REFUSALS
from said import tells, tells_each
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.core import parallel_state
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import BERT_RULES, GPT_RULES, T5_RULES
from megatron.core.parallel.collectives import PeerError, raise_together
from megatron.training import pretrain
from megatron.training.initialize import as_config_error, parse_and_check_settings, stop_with
from tools.errors import exit_status


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """launched(ranks, flags) -> the words of a command line, in a process that was started as one of so many."""

    def start(ranks: int, flags: str) -> list[str]:
        (tmp_path / "file").write_text("not a folder")
        place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that the threads of this process stay as they are
        monkeypatch.setattr(parallel_state, "start_distributed", lambda *_: pytest.fail("the processes meet"))
        return shlex.split((BASE + flags).replace("{tmp}", str(tmp_path)))

    return start


@pytest.mark.parametrize("ranks, flags, said", REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_work_is_refused_in_words(launched, tmp_path, capsys, ranks, flags, said):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, words, GPT_RULES)
    assert tells(error.value, said.replace("{tmp}", str(tmp_path)))
    assert len(error.value.problems) <= 2, "one mistake, or two that go together"
    if ranks == 1:
        with pytest.raises(SystemExit) as stop:
            pretrain(None, None, ModelType.encoder_or_decoder, lambda data, model: None, rules=GPT_RULES, argv=words)
        assert stop.value.code == 2
        printed = capsys.readouterr().err
        assert tells(printed, f"{len(error.value.problems)}")
        assert all(problem in printed for problem in error.value.problems)


@pytest.mark.parametrize("ranks, flags, said", BERT_REFUSALS.values(), ids=BERT_REFUSALS)
def test_what_bert_cannot_do_is_refused_before_the_ranks_meet(launched, tmp_path, ranks, flags, said):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, words, BERT_RULES)
    assert tells(error.value, said.replace("{tmp}", str(tmp_path)))


@pytest.mark.full
@pytest.mark.parametrize("ranks, flags, said", T5_REFUSALS.values(), ids=T5_REFUSALS)
def test_what_t5_cannot_do_is_refused_before_the_ranks_meet(launched, tmp_path, ranks, flags, said):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, pretrain_t5.DEFAULTS | {"decoder_num_layers": 0}, words, T5_RULES)
    assert tells(error.value, said.replace("{tmp}", str(tmp_path)))


@pytest.mark.parametrize("rules", [GPT_RULES, BERT_RULES], ids=["gpt", "bert"])
def test_flags_of_two_stacks_are_refused_by_models_of_one(launched, rules):
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, launched(1, MOCK + ONE_STACK), rules)
    refused = [problem.split()[0] for problem in error.value.problems if "pretrain_t5.py" in problem]
    assert refused == [word for word in ONE_STACK.split() if word.startswith("--")]


def test_the_script_of_bert_refuses_by_its_rules(launched, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain_bert.py", *launched(1, MOCK + "--eod-mask-loss --seed -1")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(__file__).parents[3] / "pretrain_bert.py"), run_name="__main__")
    assert stop.value.code == 2
    problems = [line.split()[1] for line in capsys.readouterr().err.splitlines()[1:]]
    assert problems == ["--seed", "--eod-mask-loss"]


def test_flags_of_masked_words_are_without_effect_on_a_gpt_and_it_says_so(launched):
    words = launched(1, MOCK + "--mask-prob 0.15 --bert-no-binary-head --seed 3")
    notes = parse_and_check_settings(None, None, words, GPT_RULES).notes
    assert tells_each(notes, "--mask-prob --bert-no-binary-head")
    assert parse_and_check_settings(None, None, words, BERT_RULES).notes == []


def test_a_run_of_masters_in_two_bytes_is_told_where_they_are_not_exact(launched):
    notes = {}
    for flags in ("--bf16", "--bf16 --reuse-fp32-param"):
        settings = parse_and_check_settings(None, None, launched(1, MOCK + flags))
        settings.device.restore()  # as the end of the run would
        notes[flags] = settings.notes
    assert notes["--bf16"] == []
    (said,) = notes["--bf16 --reuse-fp32-param"]
    assert tells(said, "--reuse-fp32-param 131,072")


def test_a_line_without_mistakes_is_read(launched):
    assert parse_and_check_settings(None, None, launched(1, MOCK), GPT_RULES).tokenizer.vocab_size == 61


def test_problems_of_settings_and_of_files_come_together(launched, tmp_path):
    words = launched(
        4,
        REAL + "--data-path {tmp}/no --save {tmp}/file --global-batch-size 12 --tokenizer-type "
        "GPT2BPETokenizer --vocab-file {tmp}/v --merge-file {tmp}/m",
    )
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, words, GPT_RULES)
    assert [problem.split()[0] for problem in error.value.problems] == shlex.split(
        "--global-batch-size --data-path --save --vocab-file"
    )


# Mistakes in several components: (ranks, flags, what each problem names, in any order).
TOGETHER = [
    (
        2,
        MOCK + "--weight-decay -1 --hidden-size 50 --save {tmp}/file",
        "--hidden-size 50|--weight-decay|--save {tmp}/file",
    ),
    (
        2,
        MOCK + "--hidden-size 50 --global-batch-size 3 --lr-warmup-iters 20",
        "--hidden-size 50|--global-batch-size 3|--lr-warmup-iters 20",
    ),
    (
        2,
        MOCK + "--num-layer 3 --global-batch-size 3 --max-position-embeddings 3",
        "--num-layer|--max-position-embeddings 3|--global-batch-size 3",
    ),
    (1, MOCK + "--lr fast --seed x --hidden-size 50", "--lr fast|--seed x|--hidden-size 50"),
    (
        3,
        MOCK + "--tensor-model-parallel-size 2 --max-position-embeddings 3 --keep-checkpoints 3",
        "--max-position-embeddings 3|3 2|--keep-checkpoints --save",
    ),
    (2, REAL + "--data-path {tmp}/no --seed -1 --load {tmp}/file", "--seed -1|--data-path {tmp}/no|--load {tmp}/file"),
    (2, REAL + "--data-path {tmp}/no --lr fast --device xpu", "--lr fast|--data-path {tmp}/no|--device xpu"),
    (
        1,
        MOCK + "--normalization Batch --moe-latent-size 8 --seed -1",
        "--normalization Batch|--moe-latent-size|--seed -1",
    ),
    # of the parts that could not be read nothing is said, nor of what may follow from them
    (
        6,
        MOCK + "--tensor-model-parallel-size x --pipeline-model-parallel-size 4 --global-batch-size 7",
        "--tensor-model-parallel-size x",
    ),
    (1, MOCK + "--batch-size 4 --micro-batch-size 0", "--batch-size|--micro-batch-size 0"),
]


@pytest.mark.parametrize("ranks, flags, named", TOGETHER)
def test_mistakes_in_several_components_are_said_at_once(launched, tmp_path, ranks, flags, named):
    words = launched(ranks, flags)
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, words, GPT_RULES)
    problems, expected = error.value.problems, named.replace("{tmp}", str(tmp_path)).split("|")
    assert len(problems) == len(expected), problems
    assert all(any(tells(problem, part) for problem in problems) for part in expected), problems


def test_a_back_end_of_another_device_is_refused_where_a_group_will_be_made(launched, monkeypatch):
    """Not in a process alone, where classic scripts may name nccl, nor in a job that the caller has joined over his own."""
    words = launched(2, MOCK + "--distributed-backend nccl")
    with pytest.raises(ConfigError, match="--device"):
        parse_and_check_settings(None, None, words, GPT_RULES)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert parse_and_check_settings(None, None, words, GPT_RULES).config.device.distributed_backend == "nccl"
    monkeypatch.undo()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert parse_and_check_settings(None, None, words, GPT_RULES).config.device.distributed_backend == "nccl"


def test_a_package_that_a_tokenizer_lacks_is_a_problem_like_others(launched, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # what makes its import fail
    words = launched(1, " --mock-data --seed -1 --tokenizer-type Llama2Tokenizer --tokenizer-model {tmp}/file")
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, words, GPT_RULES)
    assert [problem.split()[0] for problem in error.value.problems] == ["--seed", "--tokenizer-type"]
    assert tells(error.value, "Llama2Tokenizer")


def test_a_folder_that_allows_no_files_is_named(launched, tmp_path, monkeypatch):
    """The user who runs the tests may be allowed everything."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, launched(1, MOCK + "--save {tmp}/a/b"), GPT_RULES)
    assert tells(error.value, f"--save {tmp_path}/a/b {tmp_path}")


@pytest.mark.parametrize(("ranks", "notes"), [(2, 1), (4, 0)])
def test_shards_over_one_rank_are_noted(ranks, notes, launched):
    words = launched(ranks, MOCK + "--zero-stage 2 --num-distributed-optimizer-instances 2")
    told = parse_and_check_settings(None, None, words, GPT_RULES).notes
    assert sum(tells(note, "--num-distributed-optimizer-instances 2") for note in told) == notes


@pytest.mark.parametrize("flag", ["--save", "--offload-dir"])
def test_a_link_that_leads_nowhere_is_named(flag, launched, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, launched(1, MOCK + f"{flag} {{tmp}}/link/a"), GPT_RULES)
    assert tells(error.value, f"{flag} {tmp_path}/link/a {tmp_path}/link {tmp_path}/gone")


def test_a_cache_that_is_built_may_be_read_only(launched, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    words = launched(1, MOCK + "--data-cache-path {tmp}/cache")
    with pytest.raises(ConfigError, match="--data-cache-path"):
        parse_and_check_settings(None, None, words, GPT_RULES)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ab-GPTDataset-train-description.txt").touch()
    parse_and_check_settings(None, None, words, GPT_RULES)


def test_nothing_is_written_where_something_is_refused(launched, tmp_path):
    with pytest.raises(ConfigError):
        parse_and_check_settings(
            None, None, launched(1, MOCK + "--save {tmp}/new --max-position-embeddings 3"), GPT_RULES
        )
    assert {path.name for path in Path(tmp_path).iterdir()} == {"file"}


def test_a_stage_split_with_two_mistakes_counts_as_two_problems(launched):
    flags = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 16 "
    flags += "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5 --global-batch-size 8"
    with pytest.raises(ConfigError) as error:
        parse_and_check_settings(None, None, launched(4, MOCK + flags), GPT_RULES)
    assert tells_each(
        error.value.problems[:2], "--decoder-first-pipeline-num-layers 3 | --decoder-last-pipeline-num-layers 5"
    )
    assert all("\n" not in problem for problem in error.value.problems)


@pytest.mark.full
def test_a_rank_that_waits_for_others_in_vain_says_where(monkeypatch, capsys):
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError) as error:
        parallel_state.start_distributed("gloo", 0.005)
    with pytest.raises(SystemExit) as stop:
        stop_with(error.value)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "rank 1" in said and tells(said, f"0 2 127.0.0.1:{place['MASTER_PORT']}")


@pytest.mark.parametrize("of_another", [False, True])
def test_a_refusal_is_what_torchrun_shows_of_a_rank(of_another, monkeypatch, tmp_path, capsys):
    """Whichever rank ends first: every rank leaves the message where torchrun reads it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    problems = ["--num-layers is 0", "--seed is -5"]
    with pytest.raises(SystemExit):
        stop_with(PeerError("rank 1: " + "; ".join(problems)) if of_another else ConfigError(problems))
    block = ChildFailedError("script", {0: ProcessFailure(0, 4711, 2, str(tmp_path / "error.json"))}).format_msg()
    assert "cannot start, " in block and all(problem in block for problem in problems)


def counted(error: Exception, capsys) -> list[str]:
    """The problems that a refused run lists; their number stands before them."""
    with pytest.raises(SystemExit):
        stop_with(error)
    head, *items = capsys.readouterr().err.splitlines()
    assert head == f"cannot start, {len(items)} problem(s):" and all(item.startswith("  - ") for item in items)
    return [item.removeprefix("  - ") for item in items]


@pytest.mark.parametrize("number", [1, 2, 10, 13])
@pytest.mark.parametrize("by", ["a checkpoint", "another rank", "a tool"])
def test_the_problems_of_a_checkpoint_are_counted_and_no_other_line(by: str, number: int, capsys):
    """One line each, with the folder; the last says what to do."""
    names = [f"lacks tensor {i}" for i in range(number)]
    error = CheckpointError("/models/a", names, "fetch it again")

    def refuse():
        raise error

    if by == "a tool":
        assert exit_status("convert", refuse, "nothing was written") == 1
        (line,) = capsys.readouterr().err.splitlines()
        found = line.removeprefix("convert: ").split("; ")
        assert found.pop() == "fetch it again"
    else:
        if by == "another rank":

            def work(mesh):
                with pytest.raises((CheckpointError, PeerError)) as refused, raise_together(mesh["world"]):
                    if mesh["world"].rank == 1:
                        refuse()
                return refused.value

            told, _ = run_ranks({"dp": 2}, work)
        else:
            with pytest.raises(ConfigError) as refused, as_config_error():
                refuse()
            told = refused.value
        found = counted(told, capsys)
        start = "rank 1: " if by == "another rank" else ""
        assert found[-1].endswith("; fetch it again") and all(line.startswith(start) for line in found)
        found = [line.removeprefix(start).removesuffix("; fetch it again") for line in found]
    expected = [f"/models/a: {name}" for name in names[:10]]
    if number > 10:
        expected[-1] += f", and {number - 10} more"
    assert found == expected


def test_problems_of_settings_on_another_rank_are_counted(capsys):
    def work(mesh):
        with pytest.raises((ConfigError, PeerError)) as refused, raise_together(mesh["world"]):
            if mesh["world"].rank == 1:
                raise ConfigError(["--num-layers is 0", "--seed is -5"])
        return refused.value

    told, _ = run_ranks({"dp": 2}, work)
    assert counted(told, capsys) == ["rank 1: --num-layers is 0", "rank 1: --seed is -5"]
