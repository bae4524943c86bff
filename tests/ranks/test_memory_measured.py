"""Memory as predicted equals memory as counted, on one rank of each layout, whose others are not there.

The count knows nothing of the prediction: it sees every operator and every storage (`training/memory/tracker.py`).
"""

import re
from functools import partial
from types import ModuleType

import pytest
import torch
from local_ranks import run_ranks
from script_run import trainer_of

import pretrain_bert
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.mesh import Mesh
from megatron.training.memory import offload
from megatron.training.memory.estimate import KINDS
from megatron.training.memory.tracker import MemoryTracker
from megatron.training.training import pretrain
from tools import sample_memory
from tools.measure_memory import CASES, Case, measure
from tools.sample_memory import TOLERANCE


def check(case: Case) -> None:
    got = measure(case.arguments, case.world_size, case.rank, case.model)
    expected = got.expected
    for kind in KINDS:
        # torch keeps a few numbers of a token more than we say; every size of a tensor is exact.
        assert expected[kind] == pytest.approx(got.bytes[kind], rel=TOLERANCE[kind]), kind
    assert got.bytes["gradients"] > 0 and got.bytes["activations"] > 0
    # The peaks of the kinds need not meet; what is said of all of them is never too little.
    assert sum(expected.values()) >= 0.99 * got.total
    assert got.predicted.tiers.get("file", 0) == got.in_file


def test_a_rank_takes_what_is_predicted():
    check(
        Case(
            "--num-layers 1 --attention-dropout 0 --zero-stage 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
            "--micro-batch-size 1 --vocab-size 30 --bf16",
            4,
            1,
        )
    )


@pytest.mark.full
def test_a_rank_that_multiplies_in_float32_takes_what_is_predicted():
    check(
        Case(
            "--num-layers 2 --attention-dropout 0 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
            "--micro-batch-size 1 --vocab-size 30 --bf16 --cpu-half-products widened",
            1,
            0,
        )
    )


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shown.replace("--", "") or "plain")
def test_measured_memory_is_the_predicted(case: Case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where those with an --offload-dir have it
    check(case)


@pytest.mark.full
def test_random_settings_are_measured_and_those_of_the_log_are_not_again(tmp_path, capsys, monkeypatch):
    log = tmp_path / "cases.jsonl"
    assert sample_memory.main(["--cases", "2", "--log", str(log)]) == 0
    assert "2 within" in capsys.readouterr().out
    monkeypatch.setattr(sample_memory, "measure", None)
    assert sample_memory.main(["--cases", "2", "--log", str(log)]) == 0
    (first, *_) = log.read_text().splitlines()
    wrong = re.sub('"came": "[a-z]*"', '"came": "wrong"', first)
    log.write_text(wrong + "\n")
    assert sample_memory.main(["--cases", "1", "--log", str(log)]) == 1
    assert "0: wrong, rank" in capsys.readouterr().out


@pytest.mark.full
def test_stage_3_never_holds_a_third_of_the_state_of_one_rank():
    """While it is built too, when the model is whole for a moment, in bfloat16. (tests/zero3_memory.py: the same in processes.)"""
    words = "--num-layers 24 --hidden-size 128 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --vocab-size 250 --bf16"
    got = measure([*words.split(), "--attention-dropout", "0", "--zero-stage", "3"], 4, 1)
    unsharded = measure([*words.split(), "--attention-dropout", "0"], 1, 0).predicted.state
    assert got.ever * 3 <= unsharded


def test_a_tracker_sees_what_comes_and_goes():
    with MemoryTracker() as tracker:
        kept = torch.ones(100)
        passing = torch.ones(1000) + 1  # two at once
        del passing
        view = kept.view(10, 10)
        view.add_(1)
        live = tracker.live["activations"]
        tracker.assign("gradients", [view])
    assert live == 400 and tracker.peak["activations"] == 400 + 2 * 4000
    assert tracker.live["gradients"] == 400 and tracker.live["activations"] == 0


@pytest.mark.full
def test_offloaded_activations_need_room_too(monkeypatch):
    """2,048 tokens of width 16 are 128 KiB of float32, of which a layer keeps more than ten; the state is 16 bytes of 9,000 parameters."""
    words = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 512 --micro-batch-size 4 --attention-dropout 0 --train-iters 1 "
        "--position-embedding-type rope --vocab-size 60 --tokenizer-type NullTokenizer --mock-data --lr 1e-3 --device cpu --eval-iters 0 "
        "--cpu-offloading-num-layers 2 --min-offloaded-tensor-size "
    )

    def build(mesh: Mesh, least: int) -> None:
        with trainer_of(pretrain_gpt, mesh, f"{words} {least}"):
            pass

    monkeypatch.setattr(offload, "free_on_machine", lambda: 2**20)
    run_ranks({"dp": 1}, partial(build, least=10**6))  # none leaves
    with pytest.raises(Exception, match=r"what is offloaded does not fit the memory of .*: 1 rank.* need [3-9].* MiB"):
        run_ranks({"dp": 1}, partial(build, least=1))


@pytest.mark.full
@pytest.mark.parametrize("script", [pretrain_gpt, pretrain_bert], ids=["gpt", "bert"])
def test_a_run_prints_what_it_takes_beside_what_was_predicted(script: ModuleType, capsys, tmp_path):
    words = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 30 --mock-data"
    more = (
        "--tokenizer-type NullTokenizer --train-iters 3 --lr 0.001 --eval-iters 0 --device cpu --log-memory-interval 2"
    )
    pretrain(
        script.train_valid_test_datasets_provider,
        script.model_provider,
        ModelType.encoder_or_decoder,
        script.forward_step,
        argv=f"{words} {more} --mask-prob 0.3 --attention-dropout 0 --bf16 --offload-dir {tmp_path}".split(),
    )
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("memory of a rank, predicted:")
    assert lines[start + 1].split() == ["stage", "layers", *KINDS, "device", "host", "file"]
    assert lines[start + 3].startswith("  in host memory: slices on their way ")
    assert lines[start + 4].startswith("  in a file: masters and moments ")
    assert lines[start + 5].endswith(f"are still free below {tmp_path}")
    assert sum("masters" in line for line in lines) == 1
    measured = [line for line in lines if line.startswith("memory of a rank in iteration")]
    assert measured == ["memory of a rank in iteration 2, measured / predicted:"]
    figures = lines[lines.index(measured[0]) + 2]
    assert re.search(r"(\d+\.\d+ KiB) / \1", figures)  # equal to the last digit shown
