"""Memory as predicted equals memory as counted, on one rank of each layout, whose others are not there.

`memory_record.json` has what was counted: by a tracker that sees every operator and every storage.
"""

import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from local_ranks import run_ranks
from measured_memory import SMALL, check
from script_run import trainer_of

import pretrain_bert
import pretrain_gpt
from megatron.core.enums import ModelType
from megatron.core.ops import cblas_gemm_bf16bf16f32
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import linear_autograd
from megatron.training.memory import memory_check
from megatron.training.memory.dry_run_of_one_rank import dry_run, mesh_of
from megatron.training.memory.forecast_memory_along_schedule import KINDS, forecast, predicted_of
from megatron.training.memory.track_memory_by_kind import MemoryTracker
from megatron.training.training import pretrain
from tools.estimating.job import read
from tools.estimating.measure import measure

RECORD = json.loads((Path(__file__).parents[2] / "memory_record.json").read_text())


TINY = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --vocab-size 30 --bf16 "
LAYOUT_STRING = (  # a stage without layers, and groups of three of the twelve microbatches that are planned for twenty-four
    "--attention-dropout 0 --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||t|tL "
    "--global-batch-size 24 --microbatch-group-size-per-virtual-pipeline-stage 3"
)


@pytest.fixture
def without_amx(monkeypatch):
    """Factors of weight gradients are widened, as where the record was taken."""
    monkeypatch.setattr(cblas_gemm_bf16bf16f32, "_gemm_of_bfloat16", lambda: None)
    linear_autograd._accumulate_for.cache_clear()
    yield
    linear_autograd._accumulate_for.cache_clear()


def flags_of(record: dict) -> str:
    return " ".join(
        [record["flags"], *(f"--{name.replace('_', '-')} {record[name]}" for name in ("model", "world_size", "rank"))]
    )


@pytest.mark.parametrize(
    ("flags", "world_size", "rank"),
    [
        ("--attention-dropout 0 --zero-stage 2", 4, 1),
        ("--attention-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-router-force-load-balancing", 1, 0),
        pytest.param("--attention-dropout 0 --cpu-half-products widened", 1, 0, marks=pytest.mark.full),
        *[pytest.param(LAYOUT_STRING, 2, rank, marks=pytest.mark.full) for rank in (0, 1)],
    ],
)
def test_a_rank_takes_what_is_predicted(flags: str, world_size: int, rank: int):
    got = measure(f"{TINY}{flags} --world-size {world_size} --rank {rank}".split())
    check(got.predicted, got.bytes, got.total, got.in_file)
    assert got.bytes["gradients"] > 0 and got.bytes["activations"] > 0


@pytest.mark.full
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize(
    ("record", "values"),
    [
        pytest.param(one, values, id=f"{one['flags'].replace('--', '') or one['model']}{'-values' * values}")
        for values in (False, True)
        for one in RECORD[:: 4 if values else 1]
    ],
)
def test_recorded_peaks_are_the_predicted(record: dict, values: bool):
    """What ranks of 58 layouts took when they were trained, the others silent; by shapes, and a quarter of them by values too."""
    job = read(f"{SMALL} {flags_of(record)} --measure --device cpu".split()).job
    profile = dry_run(job, record["rank"], values=values)
    pp_rank = mesh_of(job.runtime.config, job.runtime.world_size, record["rank"])["pp"].rank
    check(predicted_of(profile, pp_rank), record["bytes"], record["all"], record["in_file"])


@pytest.mark.full
@pytest.mark.usefixtures("without_amx")
@pytest.mark.parametrize("record", RECORD[::9], ids=lambda one: one["flags"].replace("--", "") or one["model"])
def test_the_record_is_what_ranks_take_today(record: dict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where those with an --offload-dir have it
    got = measure(f"{SMALL} {flags_of(record)}".split())
    assert {**got.bytes, "all": got.total} == pytest.approx({**record["bytes"], "all": record["all"]}, rel=0.01)
    assert got.in_file == record["in_file"]


@pytest.mark.sweep
def test_stage_3_never_holds_a_third_of_the_state_of_one_rank():
    """While it is built too, when the model is whole for a moment, in bfloat16. (tests/campaigns/zero3_memory.py: the same in processes.)"""
    words = "--num-layers 24 --hidden-size 128 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --vocab-size 250 --bf16"
    got = measure([*words.split(), "--attention-dropout", "0", "--zero-stage", "3", "--world-size", "4", "--rank", "1"])
    unsharded = forecast(read([*words.split(), "--attention-dropout", "0", "--device", "cpu"]).job)[0].state
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

    monkeypatch.setattr(memory_check, "free_on_machine", lambda: 2**20)
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
