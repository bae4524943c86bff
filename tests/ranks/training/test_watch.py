"""What watches a run says the same of it in every layout, and sees the collectives and actions of a step by name."""

import json

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, Layout, TinyTrainer, my_pieces, put_together

from megatron.core.distributed.data_parallel import DataParallelConfig
from megatron.core.distributed.params_norm_and_zeros import num_zeros_in_grad, params_norm
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.parallel import collectives
from megatron.core.timers import Timers
from megatron.training.arguments.monitor_config import ProfileConfig
from megatron.training.monitor.tensor_statistics import Inspector, Statistics, statistics_of
from megatron.training.monitor.torch_profiler import StepProfiler

STEPS, BATCH = 2, 8
MODELS = {"gpt2": GPT2, "llama": LLAMA}


def watched_rank(mesh, config, layout: Layout) -> dict:
    """Two steps, the second of which is inspected; what this rank says of it, and its pieces of the whole tensors."""
    tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, optimizer=OptimizerConfig(clip_grad=0.5))
    for step in range(STEPS - 1):
        tiny.step(step)
    inspector = Inspector(tiny.model, mesh, sequence_parallel=layout.sp)
    tiny.step(STEPS - 1)
    return {
        "norm": params_norm(tiny.model, mesh, "cpu"),
        "zeros": num_zeros_in_grad(tiny.model, mesh, "cpu"),
        "tensors": inspector.finish("cpu"),
        "hooks": sum(len(module._forward_hooks) for chunk in tiny.model for module in chunk.modules()),
        "weights": [piece for chunk in tiny.model for piece in my_pieces(chunk.module, mesh, lambda p: p.data)],
        "grads": [piece for chunk in tiny.model for piece in my_pieces(chunk.module, mesh, lambda p: p.main_grad)],
    }


def watched(config, layout: Layout) -> list[dict]:
    config = layout.applied_to(config)
    sharing = config.ranks_per_kv_head(layout.tp)
    return run_ranks(layout.sizes, lambda mesh: watched_rank(mesh, config, layout), ranks_per_kv_head=sharing)


SHARDED = DataParallelConfig(
    use_distributed_optimizer=True, num_distributed_optimizer_instances=2, overlap_param_gather=True
)
LAYOUTS = [
    Layout(tp=2, pp=2, dp=2, m=2),
    Layout(tp=2, sp=True, pp=2, dp=2, m=2, v=2, schedule="interleaved"),
    Layout(tp=8, sp=True, m=2, recompute="uniform 2"),
    Layout(tp=2, dp=4, data_parallel=SHARDED),
]


@pytest.mark.full
@pytest.mark.parametrize("model", [pytest.param(m, marks=[pytest.mark.full] * (m != "gpt2")) for m in MODELS])
@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.full] * (i > 0)) for i, x in enumerate(LAYOUTS)], ids=str
)
def test_norms_zeros_and_statistics_are_those_of_one_process(layout: Layout, model: str):
    """But for the zeros in the gradient of a key's bias, which is 0 (a softmax does not see it) or what rounding leaves."""
    one, ranks = watched(MODELS[model], Layout())[0], watched(MODELS[model], layout)
    zeros = {key: of.zeros for key, of in one["tensors"].items() if key[0] == "gradient"}
    assert sum(zeros.values()) == one["zeros"]
    for rank in ranks:
        assert rank["norm"] == pytest.approx(one["norm"], rel=1e-12)
        assert rank["hooks"] == 0
        assert rank["tensors"].keys() == one["tensors"].keys()
        for key, expected in one["tensors"].items():
            got, wanted = rank["tensors"][key].values(), expected.values()
            if key[1].endswith("linear_qkv.bias"):
                del got["zeros"], wanted["zeros"]
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-13), key
        if model == "llama":  # which has no biases, and words in its table that do not occur
            assert rank["zeros"] == one["zeros"] > 0


def test_numbers_of_one_process_are_those_of_its_tensors():
    """The norm, the zeros and the statistics by torch, over whole tensors; rows of words that never occur have no gradient."""
    (one,) = watched(GPT2, Layout())
    weights, grads = put_together([one["weights"]]), put_together([one["grads"]])
    flat = torch.cat([w.flatten() for w in weights.values()])
    assert one["norm"] == pytest.approx(torch.linalg.vector_norm(flat).item(), rel=1e-12)
    assert one["zeros"] == sum(int((g == 0).sum()) for g in grads.values())
    for what, whole in (("parameter", weights), ("gradient", grads)):
        for name, x in whole.items():
            got = one["tensors"][what, name].values()
            expected = {
                "mean": x.mean().item(),
                "std": x.std(correction=0).item(),
                "max": x.abs().max().item(),
                "zeros": (x == 0).double().mean().item(),
                "not-finite": 0.0,
            }
            assert got == pytest.approx(expected, rel=1e-9, abs=1e-15), (what, name)
    activations = {name for what, name in one["tensors"] if what == "activation"}
    layers = [f"language_model.decoder.layers.{i}{part}" for i in range(4) for part in ("", ".self_attention", ".mlp")]
    assert activations == {"language_model.embedding", "language_model.decoder.final_layernorm", *layers}


def test_statistics_add_up_and_keep_what_is_not_finite_apart():
    x = torch.tensor([1e8 + 1, 1e8 + 2, 0.0, torch.nan, torch.inf, 1e8 + 3], dtype=torch.float64)
    parts = statistics_of(x[:1]) + Statistics() + statistics_of(x[1:4]) + statistics_of(x[4:])
    assert parts.values() == pytest.approx(statistics_of(x).values(), rel=1e-12)
    assert (parts.values()["zeros"], parts.values()["not-finite"], parts.largest) == (1 / 6, 2 / 6, 1e8 + 3)
    assert statistics_of(torch.full((1000,), 1e8)).values()["std"] == 0
    assert statistics_of(torch.tensor([torch.nan])).values()["mean"] == 0


def test_texts_of_all_ranks_arrive_whole():
    texts = ["", "a longer one, with ü", '{"json": [1, 2]}']
    got = run_ranks({"dp": 3}, lambda mesh: collectives.all_gather_texts(texts[mesh["dp"].rank], mesh["dp"]))
    assert got == [texts] * 3


def test_timers_are_gathered_from_the_ranks_that_have_them():
    def work(mesh):
        said = []
        timers = Timers(2, world=mesh["world"], say=said.append)
        with timers("forward-backward"):
            pass
        if mesh["world"].rank == 1:
            timers("batch-generator", log_level=2).start()
            timers("batch-generator", log_level=2).stop()
        return timers.log(normalizer=2), said, timers.log()

    for table, said, again in run_ranks({"dp": 2}, work):
        assert {name: sorted(of) for name, of in table.items()} == {"forward-backward": [0, 1], "batch-generator": [1]}
        assert said[0].splitlines()[0] == "(min, max) time across ranks (ms):"
        assert all(seconds == 0 for of in again.values() for seconds in of.values())


def test_a_profile_names_collectives_and_writes_the_steps_asked_for(tmp_path):
    config = ProfileConfig(profile=True, profile_step_start=1, profile_step_end=2, profile_ranks=[1])

    def work(mesh):
        profiler = StepProfiler(config, str(tmp_path), mesh)
        for iteration in (1, 2, 3):
            with profiler.step(iteration):
                collectives.all_reduce(torch.ones(iteration), mesh["dp"])
            profiler.write_if_done(iteration)
        assert not mesh.ledger.profiled

    run_ranks({"dp": 2}, work)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-2-2-rank-1.json"
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event]
    assert names.count("step 2") >= 1 and "step 3" not in names
    assert "all_reduce dp (8 bytes)" in names and "wait for all_reduce dp" in names
