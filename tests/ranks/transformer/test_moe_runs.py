"""Runs of pretrain_gpt.py with experts: resumed, resharded, measured, and what their ranks send."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import read_record, write_folder
from documents import ROOT, commands_of, names_of_block
from expert_models import BATCH, GPT2, LLAMA, SUBJECT, zero
from local_ranks import run_ranks
from measured_memory import SMALL
from said import tells
from script_run import trainer_of
from tiny_run import SEQ, TINY_LLAMA, Layout, TinyTrainer
from torch import Tensor
from whole_run import TINY

import pretrain_gpt
from megatron.core.base.async_handle import AsyncHandle, done
from megatron.core.dist_checkpointing import load_whole_tensors, open_checkpoint
from megatron.core.distributed.sync_and_gather_params import full_state_dict
from megatron.core.inference import load_gpt, read_saved_settings
from megatron.core.inference.generate import generate_batch
from megatron.core.inference.load_model import single_rank_mesh
from megatron.core.inference.top_k_top_p_sampling import greedy
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.count_flops_by_module import stage_flops
from megatron.core.optimizer.loss_scaler import DynamicGradScaler
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import EXPERT_DATA_PARALLEL, Axis
from megatron.core.tensor_parallel.linear_autograd import TorchMatmul
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher
from megatron.core.transformer.moe.in_memory_route_replay import RouteReplay
from megatron.training.memory.forecast_memory_along_schedule import KINDS
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape
from megatron.training.monitor.expert_loads import STEPS, ExpertLoad, IdleExperts, load_curves
from megatron.training.step import NotFiniteError
from tools.estimating.measure import measure, measured_report

FLAGS = (
    " --fp64 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --global-batch-size 4 --num-experts 8 --moe-ffn-hidden-size 8 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-4 --swiglu "
    "--ffn-hidden-size 8 --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 4 --override-opt_param-scheduler "
    "--lr-decay-iters 18 "
)
WITHOUT_BIAS = FLAGS.replace("--moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-4 ", "")
EP2 = " --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 3 --overlap-param-gather --overlap-grad-reduce"


def run_script(sizes: dict[str, int], flags: str, model: str = FLAGS) -> list[dict[str, Tensor]]:
    """Each rank's parameters and buffers at the end of a run."""

    def rank(mesh: Mesh) -> dict[str, Tensor]:
        with trainer_of(pretrain_gpt, mesh, " ".join(TINY) + model + flags, predicts=False) as trainer:
            trainer._train()
            return {n: p.clone() for chunk in trainer.model for n, p in full_state_dict(chunk.module).items()}

    return run_ranks(sizes, rank)


def texts_of(folder: Path, sizes: dict[str, int]) -> list[list[int]]:
    checkpoint = open_checkpoint(folder)
    saved = read_saved_settings(checkpoint.state, "saved")

    def rank(mesh: Mesh) -> list[list[int]]:
        options = {"vocab_size": saved.vocab_size, "positions": saved.positions, "mesh": mesh}
        model = load_gpt(checkpoint, saved.transformer, **options)
        steps = generate_batch(
            model, [[1, 2, 3], [4, 5]], max_new_tokens=4, stop_id=None, choose=[greedy, greedy], mesh=mesh, max_length=8
        )
        return [list(step) for step in steps]

    texts = run_ranks(sizes, rank)
    assert all(text == texts[0] for text in texts)
    return texts[0]


@pytest.mark.full
def test_a_run_resumes_to_the_bit_loads_with_other_expert_ranks_and_generates(tmp_path):
    sizes = {"tp": 2, "dp": 2, "ep": 2}
    checks = "--log-params-norm --log-num-zeros-in-grad --check-weight-hash-across-dp-replicas-interval 1 --check-state-hash-interval 1"
    whole = run_script(sizes, f"{EP2} {checks} --train-iters 3 --save {tmp_path / 'whole'}")
    run_script(sizes, f"{EP2} --train-iters 2 --save {tmp_path / 'half'}")
    again = run_script(sizes, f"{EP2} --train-iters 3 --load {tmp_path / 'half'} --save {tmp_path / 'again'}")
    for before, after in zip(whole, again, strict=True):
        assert before.keys() == after.keys() and any(name.endswith("expert_bias") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for name, value in whole[0].items() if name.endswith("expert_bias"))

    # EP 1, and EP 2 x ETP 2 of one tensor-parallel rank, train on as it does
    expected = load_whole_tensors(tmp_path / "whole")
    layer = "model/language_model.decoder.layers.0.mlp."
    assert expected[f"{layer}experts.linear_fc1.weight"].shape == (8, 2, 8, 8)
    assert expected[f"{layer}experts.linear_fc2.weight"].shape == (8, 8, 8)
    assert expected[f"{layer}shared_experts.linear_fc1.weight"].shape == (8, 8)
    for ep, etp in ((1, 1), (2, 2)):
        ranks = {"dp": ep * etp, "ep": ep, "etp": etp}
        flags = f" --expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp} --train-iters 3"
        run_script(ranks, f"{flags} --load {tmp_path / 'half'} --save {tmp_path / str(ep)}")
        got = load_whole_tensors(tmp_path / str(ep))
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            worst = (got[name].double() - value.double()).abs().max()
            assert worst <= 1e-9 * value.double().abs().max(), f"{name} differs by {worst} with {ep} x {etp}"

    # one process generates what expert-parallel ranks do
    alone = texts_of(tmp_path / "whole", {})
    assert len(alone) == 4
    assert texts_of(tmp_path / "whole", {"dp": 4, "ep": 4}) == alone
    assert texts_of(tmp_path / "whole", {"tp": 2, "ep": 2, "etp": 1}) == alone


BEGINS = [
    pytest.param({}, "", "--finetune", id="alone"),
    pytest.param({}, "", "", id="alone, resumed", marks=pytest.mark.full),
    pytest.param({"tp": 2, "dp": 2, "ep": 2}, EP2, "--finetune", id="EP", marks=pytest.mark.full),
    pytest.param({"tp": 2, "dp": 2, "ep": 2}, EP2, "", id="EP, resumed", marks=pytest.mark.full),
    pytest.param({"pp": 2}, " --pipeline-model-parallel-size 2", "", id="PP, resumed", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("sizes", "layout", "how"), BEGINS)
def test_a_bias_that_the_checkpoint_lacks_begins_at_zeros(
    sizes: dict[str, int], layout: str, how: str, tmp_path: Path, capsys
):
    """The first step is to the bit that of the model without it, and then the run saves and resumes to the bit."""
    base, on = tmp_path / "base", tmp_path / "on"
    rate = torch.tensor(2e-4).item()  # of one step
    run_script({}, f" --train-iters 1 --save {base}", WITHOUT_BIAS)
    first = 1 if how else 2
    from_base = f"{layout} {how} --load {base} --train-iters"
    plain = run_script(sizes, f"{from_base} {first}", WITHOUT_BIAS)
    capsys.readouterr()
    started = run_script(sizes, f"{from_base} {first} --save {on}")
    line = "another moe_router_enable_expert_bias: False before, True now"
    assert ("weights are of a run with " if how else "resumed with ") + line in capsys.readouterr().out
    for before, after in zip(plain, started, strict=True):
        biases = [after[name] for name in after.keys() - before.keys()]
        assert biases and all(bias.any() and {*bias.abs().tolist()} <= {0.0, rate} for bias in biases)
        assert all(torch.equal(before[name], after[name]) for name in before)
    whole = run_script(sizes, f"{from_base} {first + 1}")
    resumed = run_script(sizes, f"{layout} --load {on} --train-iters {first + 1}")
    for before, after in zip(whole, resumed, strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


DENSE = (
    " --fp64 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --global-batch-size 4 --swiglu --ffn-hidden-size 8"
)


@pytest.mark.parametrize("how", ["--load {run}", "--finetune --load {run}", "--pretrained-checkpoint {run}"])
def test_a_dense_checkpoint_names_the_tool_that_makes_experts_of_it(how: str, tmp_path: Path, refused):
    run_script({}, f" --train-iters 1 --save {tmp_path}", DENSE)
    told = refused(f"{DENSE} {how.format(run=tmp_path)} --num-experts 4 --train-iters 2")
    assert tells(
        told, f"num_experts: tools/checkpoint_convert.py --load {tmp_path} --num-experts 4 --moe-use-upcycling"
    )


def test_other_layers_of_experts_are_refused_by_the_flag_that_was_given(tmp_path: Path, refused):
    """And not by --ffn-hidden-size too, which only the dense layers of one of both have."""
    run_script({}, f" --train-iters 1 --save {tmp_path}", FLAGS)
    told = refused(f"{FLAGS} --load {tmp_path} --train-iters 2 --moe-layer-freq 2")
    assert tells(told, "moe_layer_freq: [1,1] [1,0]") and "ffn_hidden_size: " not in told


@pytest.mark.parametrize("how", ["--load", "--pretrained-checkpoint"])
def test_a_published_dense_folder_names_that_tool_too(how: str, tmp_path: Path, refused):
    write_folder(tmp_path / "llama", read_record("llama"))
    flags = "--seq-length 8 --mock-data --micro-batch-size 1 --lr 0.1 --tokenizer-type NullTokenizer --vocab-size 30"
    told = refused(f"{how} {tmp_path}/llama --num-experts 4 --train-iters 1", tiny=flags.split())
    assert tells(told, f"tools/checkpoint_convert.py --load {tmp_path}/llama --num-experts 4 --moe-use-upcycling")


def test_a_checkpoint_with_experts_names_no_tool_to_a_run_without(tmp_path: Path, refused):
    run_script({}, f" --train-iters 1 --save {tmp_path}")
    told = refused(f"{DENSE} --load {tmp_path} --train-iters 2")
    assert "num_experts: the checkpoint has 8, this run has None" in told and "checkpoint_convert" not in told


def test_a_bias_that_the_checkpoint_has_is_not_left_out(tmp_path: Path, refused):
    run_script({}, f" --train-iters 1 --save {tmp_path}")
    for how in ("", "--finetune"):
        told = refused(f"{WITHOUT_BIAS} {how} --load {tmp_path} --train-iters 2")
        assert tells(told, "another model moe_router_enable_expert_bias True False tokens would visit other experts")


def test_a_bias_of_logits_begins_at_zeros_where_new_parameters_are_taken(tmp_path: Path, capsys, refused):
    run_script({}, f" --train-iters 1 --save {tmp_path}")
    told = refused(f"{FLAGS} --load {tmp_path} --train-iters 2 --moe-router-bias")
    assert tells(told, "another model moe_router_bias False True --finetune --allow-missing-tensors")
    losses = []
    for more in ("", "--moe-router-bias --allow-missing-tensors"):
        capsys.readouterr()
        run_script({}, f" --load {tmp_path} --finetune --train-iters 1 --log-interval 1 {more}")
        text = capsys.readouterr().out
        losses.append(text.split("lm loss")[1].split("|")[0])
    assert losses[0] == losses[1]
    assert tells(text, "lacks 2 parameters mlp.router.bias another moe_router_bias: False before, True now")


@pytest.mark.full
def test_the_commands_of_the_page_train():
    """A few steps of each, on as many ranks, whose losses are equal."""
    losses = []
    for command in commands_of(ROOT / "docs" / "experts.md"):
        launcher, _, flags = command.partition(" pretrain_gpt.py ")
        sizes = {"dp": 2, "ep": 2} if "--nproc-per-node 2" in launcher else {}
        assert ("--expert-model-parallel-size 2" in flags) == bool(sizes)

        def rank(mesh: Mesh, flags: str = flags) -> float:
            short = f"{flags} --train-iters 2 --lr-warmup-iters 0 --num-layers 2 --seq-length 16 --fp64"
            with trainer_of(pretrain_gpt, mesh, short, predicts=False) as trainer:
                trainer._train()
                return sum(
                    p.double().sum().item() for chunk in trainer.model for p in chunk.parameters() if p.dim() == 1
                )

        losses += run_ranks(sizes, rank)
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-9)


@pytest.mark.parametrize(
    ("stages", "layers"),
    [
        (1, [1]),
        pytest.param(2, [0, 1], id="a stage without experts"),
        pytest.param(2, [1, 0], id="a last stage without experts", marks=pytest.mark.full),
        pytest.param(2, [0, 1, 0, 1], id="chunks without experts", marks=pytest.mark.full),
    ],
)
def test_the_forward_step_of_the_page_trains_on_the_routes_of_evaluation(
    stages: int, layers: list[int], monkeypatch: pytest.MonkeyPatch
):
    """They are those of training where no expert drops a token and nothing is drawn: the run's losses are equal, bit for bit."""
    page = names_of_block("experts.md", "RouteReplay")
    replays = []
    monkeypatch.setitem(page, "RouteReplay", lambda chunks: replays.append(RouteReplay(chunks)) or replays[-1])
    flags = f"{' '.join(TINY)} --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-enable-routing-replay --train-iters 2"
    flags += f" --hidden-dropout 0 --attention-dropout 0 --moe-layer-freq '{layers}' --num-layers {len(layers)}"
    flags += f" --pipeline-model-parallel-size {stages} --global-batch-size 2"
    if len(layers) > stages:
        flags += " --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule interleaved"

    def rank(mesh: Mesh, step: Callable) -> list[dict[str, float]]:
        losses = []
        script = SimpleNamespace(**vars(pretrain_gpt) | {"forward_step": step})
        with trainer_of(script, mesh, flags, predicts=False) as trainer:
            trainer._report = lambda result, *_, **__: losses.append((dict(result.losses), result.grad_norm))
            trainer._train()
        return losses

    sizes = {"pp": stages}
    plain = run_ranks(sizes, partial(rank, step=pretrain_gpt.forward_step))
    replayed = run_ranks(sizes, partial(rank, step=page["forward_step"]))
    assert plain == replayed and all(len(steps) == 2 for steps in plain)
    assert any(replay.routes for replay in replays)
    assert stages == 1 or any(not replay.routes for replay in replays)


@pytest.mark.parametrize(("experts", "notes"), [("", 1), (" --num-experts 4", 0)])
def test_logging_by_layer_is_named_where_no_layer_has_anything_to_log(experts: str, notes: int, tmp_path, capsys):
    """With curves, and known once the model is built: layers of a script may have losses of their own."""
    flags = f"{' '.join(TINY)} --train-iters 1 --moe-per-layer-logging --metrics-file {tmp_path / 'metrics'}{experts}"

    def rank(mesh: Mesh) -> None:
        with trainer_of(pretrain_gpt, mesh, flags, predicts=False) as trainer:
            trainer._announce()

    run_ranks({}, rank)
    assert capsys.readouterr().out.count("no effect here: --moe-per-layer-logging") == notes


# ---------------------------------------------------------------- what ranks send

FORCED = {"moe_router_force_load_balancing": True}


def calls_of(config: ModelConfig, layout: Layout) -> list[list[tuple[str, str, int]]]:
    def work(mesh: Mesh) -> list[tuple[str, str, int]]:
        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT)
        with mesh.ledger.record() as calls:
            tiny.step(0)
        return [(call.op, call.axis, call.bytes) for call in calls]

    return run_ranks(layout.sizes, work, ranks_per_kv_head=config.ranks_per_kv_head(layout.tp))


SENT = [
    Layout(tp=2, dp=2, ep=2, m=1, data_parallel=zero(1)),
    Layout(tp=2, sp=True, dp=2, ep=4, etp=1, m=1, data_parallel=zero(1)),
    pytest.param(Layout(dp=4, ep=4, m=1, data_parallel=zero(1)), marks=pytest.mark.sweep),
]


@pytest.mark.parametrize("layout", SENT, ids=str)
def test_rows_travel_as_the_closed_form_says(layout: Layout):
    """Of T tokens on a rank, with forced balance, R = K T rows: each goes to the ranks that have a part of its expert, and its results
    come back; the backward sends the gradients the same way. Numbers of rows travel once. With all-gather every rank receives all
    tokens, weights and choices, and the sums are scattered."""
    layers, h, e, k = GPT2.num_layers, GPT2.hidden_size, 8, 2
    ep, etp = layout.ep, layout.etp or layout.tp
    tokens = SEQ // layout.tp * (BATCH // layout.dp)  # of a rank
    rows = k * tokens
    for calls in calls_of(replace(GPT2, **FORCED, moe_token_dispatcher_type="alltoall"), layout):
        sent = [(op, size) for op, axis, size in calls if axis == "ep_etp" or (axis == "ep" and etp == 1)]
        counts = Counter(sent)
        there = (rows * etp - rows // ep) * h * e  # rows that leave the rank
        assert counts == {("all_to_all", 8 * 8 * etp): layers, ("all_to_all_v", there): 4 * layers}
    for calls in calls_of(replace(GPT2, **FORCED, moe_token_dispatcher_type="allgather"), layout):
        sent = Counter((op, size) for op, axis, size in calls if axis == "ep_etp" or (axis == "ep" and etp == 1))
        x, weights, everyone = tokens * h * e, rows * e, ep * etp
        assert sent[("all_gather", x)] == 2 * layers  # tokens, and gradients of the sums
        assert sent[("reduce_scatter", everyone * x)] == 2 * layers
        assert sent[("all_gather", weights)] == 2 * layers  # weights, and choices of 8 bytes
        assert sent[("reduce_scatter", everyone * weights)] == layers


def test_a_rank_computes_its_own_rows_while_the_others_travel(monkeypatch: pytest.MonkeyPatch):
    """Two rows in four are a rank's own. Half of its experts have theirs computed during the dispatch, the other half while the
    results go back, and so have the gradients. Experts without rows have no product. The gradient of the first weights from others'
    rows comes when the gradients of these rows are under way, before anything else there."""
    config = replace(GPT2, **FORCED, moe_token_dispatcher_type="alltoall", num_layers=1)
    layout = Layout(dp=2, ep=2, m=1, data_parallel=zero(1))
    products: dict[int, list[str]] = {}  # of each thread

    def noting(name: str, method: Callable[..., None]):
        def note(*arguments, **options) -> None:
            products.setdefault(threading.get_ident(), []).append(name)
            method(*arguments, **options)

        return note

    for name in ("write_forward", "write_dgrad"):
        monkeypatch.setattr(TorchMatmul, name, noting(name, getattr(TorchMatmul, name)))
    monkeypatch.setattr(experts, "_accumulate", noting("wgrad", experts._accumulate))

    def work(mesh: Mesh) -> list[str]:
        events = products.setdefault(threading.get_ident(), [])

        def listen(call, tensor, *, is_result: bool) -> None:
            if call.op == "all_to_all_v":
                events.append("end" if is_result else "begin")

        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT)
        mesh.ledger.listener = listen
        tiny.step(0)
        return events

    two = 2  # linears
    sent, received = ("begin", 1), ("end", 1)
    before = [sent, ("write_forward", 2 * two), received, ("write_forward", 4 * two)]
    after = [sent, ("write_forward", 2 * two), received]
    both, of_other, wgrad = [("write_dgrad", 2), ("wgrad", 1)] * two, ("write_dgrad", 4), ("wgrad", 1)
    before_in_backward = [sent, *both, received, of_other, wgrad, of_other]
    after_in_backward = [sent, wgrad, *both, received]

    for events in run_ranks(layout.sizes, work):
        runs = [(name, len(list(same))) for name, same in groupby(events)]
        assert runs == [*before, *after, *before_in_backward, *after_in_backward]


OVERLAPS_SHARED = replace(
    LLAMA,
    moe_token_dispatcher_type="alltoall",
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_overlap=True,
    num_layers=1,
)


def test_dispatch_begins_before_the_shared_experts_and_is_waited_for_after_them():
    config = OVERLAPS_SHARED
    layout = Layout(tp=2, dp=2, ep=2, m=1, data_parallel=zero(1))

    def work(mesh: Mesh) -> list[str]:
        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT)
        events = []

        def listen(call, tensor, *, is_result: bool) -> None:
            if call.op == "all_to_all_v" or (call.op == "all_reduce" and call.axis == "tp"):
                events.append(("end " if is_result else "begin ") + call.op)

        mesh.ledger.listener = listen
        tiny.step(0)
        return events

    dispatch = ["begin all_to_all_v", "begin all_reduce", "end all_reduce", "end all_to_all_v"]
    for events in run_ranks(layout.sizes, work):
        found = [i for i in range(len(events)) if events[i : i + 4] == dispatch]
        assert len(found) == 2, events  # in the forward, and the gradients of the rows in the backward


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2, m=1), Layout(tp=2, dp=2, ep=2, m=1)], ids=str)
@pytest.mark.parametrize("recompute", ["uniform 1", "moe", "none"])
@pytest.mark.parametrize("trained", ["mlp.shared_experts.", "mlp.experts.", "mlp.router."])
def test_what_is_sent_is_waited_for_whichever_parameters_train(trained: str, recompute: str, layout: Layout):
    """A recomputation ends with the last tensor that the backward needs. No rows may be under way then, also where only the
    shared experts are needed, which are computed while rows travel."""
    config = OVERLAPS_SHARED
    if recompute == "moe":
        layout = replace(layout, recompute="selective")
        config = replace(config, recompute_granularity="selective", recompute_modules=["moe"])
    else:
        layout = replace(layout, recompute=recompute)

    def work(mesh: Mesh, config: ModelConfig) -> tuple[Counter, float]:
        calls = Counter()

        def listen(call, tensor, *, is_result: bool) -> None:
            if call.op.startswith("all_to_all"):
                calls["waited for" if is_result else "started"] += 1

        def frozen(name: str) -> bool:
            return trained not in name

        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT, frozen=frozen)
        mesh.ledger.listener = listen
        return calls, tiny.step(0).grad_norm

    without_overlap = replace(config, moe_shared_expert_overlap=False)
    (_, expected), *_ = run_ranks(layout.sizes, lambda mesh: work(mesh, without_overlap))
    for calls, norm in run_ranks(layout.sizes, lambda mesh: work(mesh, config)):
        assert calls["started"] == calls["waited for"] > 0
        assert norm == pytest.approx(expected, rel=1e-12) and norm > 0


@pytest.mark.parametrize("checked", [True, False])
def test_a_step_without_an_update_moves_the_expert_bias_and_no_parameter(checked: bool):
    """As Megatron's does; the message of a step that is stopped says no more than that."""
    config = replace(LLAMA, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)

    def work(mesh: Mesh) -> tuple[str, bool, list[str]]:
        scaler = DynamicGradScaler(2.0, minimum=2.0, window=4, hysteresis=1)
        tiny = TinyTrainer(mesh, config, Layout(m=2), global_batch=BATCH, subject=SUBJECT, scaler=scaler)
        (chunk,) = tiny.model
        for name, parameter in chunk.module.named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.data.fill_(torch.nan)
        before = {name: x.clone() for name, x in chunk.module.state_dict().items()}
        said, skipped = "", False
        try:
            skipped = tiny.step(0, check_finite=checked).skipped
        except NotFiniteError as error:
            said = str(error)
        after = chunk.module.state_dict()
        return (
            said,
            skipped,
            [name for name, x in before.items() if not torch.equal(x.nan_to_num(), after[name].nan_to_num())],
        )

    ((said, skipped, changed),) = run_ranks({}, work)
    assert changed and all(name.endswith("mlp.router.expert_bias") for name in changed), changed
    if checked:
        assert "no parameter was updated" in said and "nothing" not in said
    else:
        assert skipped


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_rank_without_rows_trains_with_the_others(stage: int):
    """All tokens choose two experts of the first rank; the second rank's experts have gradients of zero."""
    config = replace(
        GPT2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_token_dispatcher_type="alltoall",
    )
    layout = Layout(dp=2, ep=2, m=2, data_parallel=zero(stage))

    def work(mesh: Mesh) -> float:
        tiny = TinyTrainer(mesh, config, layout, global_batch=BATCH, subject=SUBJECT)
        for name, value in tiny.model[0].module.named_buffers():
            if name.endswith("expert_bias"):
                value[:2] = 1e6
        norm = tiny.step(0).grad_norm
        (experts,) = (buffer for buffer in tiny.buffers if buffer.plan.key[0] == EXPERT_DATA_PARALLEL)
        assert all(bool(tensor.any()) == mesh["ep"].is_first for tensor in experts.sums.tensors)
        return norm

    norms = run_ranks(layout.sizes, work)
    assert norms[0] == norms[1] > 0


# ---------------------------------------------------------------- memory, work and loads

MEMORY = [
    "--world-size 2 --rank 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "--world-size 2 --rank 1 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    pytest.param("--world-size 2 --rank 0 --expert-model-parallel-size 2", marks=pytest.mark.sweep),
    pytest.param(
        "--world-size 1 --rank 0 --recompute-granularity selective --recompute-modules moe_act", marks=pytest.mark.sweep
    ),
    pytest.param(
        "--world-size 4 --rank 3 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 "
        "--sequence-parallel --zero-stage 2 --moe-token-dispatcher-type alltoall",
        marks=pytest.mark.sweep,
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--world-size 2 --expert-model-parallel-size 2", True),
        ("--world-size 2 --expert-model-parallel-size 2 --moe-router-force-load-balancing", False),
        ("--world-size 1", False),
    ],
)
def test_a_measurement_says_that_its_experts_are_not_those_of_the_prediction(flags: str, says: bool):
    lines = measured_report(measure(f"{SMALL} --num-experts 8 {flags}".split()))
    assert any("--moe-router-force-load-balancing" in line for line in lines) == says


@pytest.mark.full
@pytest.mark.parametrize("flags", MEMORY)
def test_memory_is_predicted_where_experts_have_equal_numbers_of_rows(flags: str):
    """From shapes alone, where nobody can read how many rows come; measured with values."""
    experts = (
        "--num-experts 8 --moe-ffn-hidden-size 96 --swiglu --moe-router-force-load-balancing --moe-aux-loss-coeff 0.01"
    )
    got = measure(f"{SMALL} {flags} {experts}".split())
    predicted = got.predicted.bytes
    for kind, size in got.bytes.items():
        assert predicted[kind] == pytest.approx(size, rel=0.0 if kind in KINDS[:3] else 0.05, abs=1024), kind
    assert sum(predicted.values()) >= 0.99 * got.total  # the peaks of the kinds need not meet


WORST = [
    "--moe-token-dispatcher-type alltoall",
    *(
        pytest.param(flags, marks=pytest.mark.sweep)
        for flags in (
            "--moe-token-dispatcher-type allgather",
            "--moe-token-dispatcher-type alltoall --moe-router-topk 4",
            "--moe-token-dispatcher-type allgather --recompute-granularity selective --recompute-modules moe",
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("flags", WORST)
def test_memory_stays_within_the_bound_where_all_tokens_visit_the_experts_of_one_rank(
    flags: str, monkeypatch: pytest.MonkeyPatch
):
    """docs/experts.md, Memory and work. Each other rank sends as many rows as this one keeps."""

    def first(logits: Tensor, k: int, **_) -> Tensor:
        return torch.arange(k, device=logits.device).expand(*logits.shape[:-1], k).clone()

    def as_many_from_each(counts: Tensor, axis: Axis) -> AsyncHandle[Tensor]:
        return done(counts[axis.rank].expand_as(counts).clone())

    alike = SimpleNamespace(**vars(token_dispatcher.collectives) | {"start_all_to_all": as_many_from_each})
    monkeypatch.setattr(moe_utils, "choose_experts", first)
    monkeypatch.setattr(token_dispatcher, "collectives", alike)
    ep, layers, h, f = 2, 2, 64, 96
    ranks = f"--world-size {ep} --rank 0 --expert-model-parallel-size {ep}"
    got = measure(
        f"{SMALL} {ranks} --num-layers {layers} --num-experts 8 --moe-ffn-hidden-size {f} --swiglu {flags}".split()
    )
    rows = (4 if "topk 4" in flags else 2) * 2 * 64  # of a microbatch of this rank
    results = "allgather" in flags  # of all experts here; alltoall keeps those of the rank's own tokens
    more = (ep - 1) * rows * (layers + 1) * ((1 + results) * h + 3 * f) * 4
    predicted = got.predicted.bytes["activations"]
    assert predicted < got.bytes["activations"] <= 1.01 * predicted + more
    if "recompute" not in flags:
        assert got.bytes["activations"] >= predicted + more * layers / (layers + 1)


@pytest.mark.parametrize(
    "experts", [{}, {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True, "moe_layer_freq": "2"}]
)
def test_a_token_counts_the_experts_that_it_visits(experts: dict):
    config = replace(TINY_LLAMA, num_experts=8, moe_ffn_hidden_size=12, **experts)
    parts = {"vocab_size": 61, "positions": SEQ, "layers": range(config.num_layers)}
    model = GPTModel(config, context=LayerContext.from_mesh(single_rank_mesh(), torch.float64, device="meta"), **parts)
    shape = ModelShape.of(config, 61, SEQ)
    assert stage_flops(model, SEQ).model == shape.flops_per_sample
    active = 16 * 8 + 3 * 16 * 12 * 2 + (3 * 16 * 8 + 16 if experts else 0)
    assert shape.expert_parameters == active and shape.expert_layers == (2 if experts else 4)


def test_loads_are_told_and_experts_without_a_token_for_long_named_once():
    busy = ExpertLoad(0, [6, 2, 0, 0], [0, 0, STEPS - 1, 3])
    assert load_curves([busy]) == {"moe/max_load_layer_0": 3.0, "moe/min_load_layer_0": 0.0}
    idle = IdleExperts()
    assert idle.notes([busy]) == []
    later = busy._replace(idle=[0, 0, STEPS, 4])
    (note,) = idle.notes([later])
    assert "layer 0" in note and "expert 2 of 4" in note and str(STEPS) in note
    assert idle.notes([later]) == []
    assert idle.notes([busy]) == [] and len(idle.notes([later])) == 1
