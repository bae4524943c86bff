"""The ledger shows exactly the collectives that the algebra says, to the byte.

Per layer and microbatch, with N = bytes of one activation [s, b, h] and sigma = (t - 1) / t (Narayanan et al. 2021, section 3.2;
Korthikanti et al. 2022, section 4.2.2):

    tensor parallel         2 all-reduces forward, 2 backward                               8 sigma N sent
    with sequence parallel  2 all-gathers + 2 reduce-scatters forward, the same backward,
                            and 2 all-gathers of layer inputs kept divided                  10 sigma N sent

Besides these a step sends scalars: the loss report and the token count, the gradient norm. `test_parity.py` holds the calls of
every layout of the covering set against `traffic.py`.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from communication_doc import document
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, SEQ, Layout, OptimizerConfig, build, sample, train_rank
from torch import nn

from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.parallel.collectives import Call, bytes_sent

BATCH, FLOAT64 = 6, 8
PLAIN = replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0)
# What a step sends beside activations and gradients: (op, axis, bytes), each once.
SCALARS = {
    ("all_reduce", "mp"): FLOAT64,  # the norm of the gradient
    ("all_reduce", "pp"): 2 * FLOAT64,  # the number of tokens, the sum of the losses
}
REPORT = 4 * FLOAT64  # these, sum and count of the one reported loss: all-reduce over dp in the last stage


def calls_of_step(config, layout: Layout) -> list[list[Call]]:
    """The calls of one training step of each rank."""

    def work(mesh):
        with mesh.ledger.record() as calls:
            train_rank(
                mesh, config, layout, steps=1, global_batch=BATCH * layout.dp, optimizer=OptimizerConfig(clip_grad=0.0)
            )
        return calls

    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    return run_ranks(sizes, work, ranks_per_kv_head=config.ranks_per_kv_head(layout.tp))


def per_layer(layout: Layout, style) -> tuple[Counter, Counter]:
    """(op, axis, bytes) -> calls of a step on rank 0 that one more layer adds, and that it replaces."""
    deep, shallow = (
        Counter((c.op, c.axis, c.bytes) for c in calls_of_step(replace(style, num_layers=n), layout)[0]) for n in (2, 1)
    )
    return deep - shallow, shallow - deep


@pytest.mark.full
@pytest.mark.parametrize("style", [PLAIN, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("t", [2, 4])
def test_a_tensor_parallel_layer_costs_four_all_reduces(t: int, style):
    activation = SEQ * BATCH * style.hidden_size * FLOAT64
    added, replaced = per_layer(Layout(tp=t), style)
    assert not replaced
    assert added == Counter({("all_reduce", "tp", activation): 4})
    assert sum(bytes_sent(Call(*key, t)) * n for key, n in added.items()) == 8 * (t - 1) / t * activation


@pytest.mark.full
@pytest.mark.parametrize("style", [PLAIN, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("t", [2, 4])
def test_a_sequence_parallel_layer_costs_six_gathers_and_four_scatters(t: int, style):
    activation = SEQ * BATCH * style.hidden_size * FLOAT64
    added, replaced = per_layer(Layout(tp=t, sp=True), style)
    moves = Counter({("all_gather", "tp", activation // t): 6, ("reduce_scatter", "tp", activation): 4})
    assert sum(bytes_sent(Call(*key, t)) * n for key, n in moves.items()) == pytest.approx(
        10 * (t - 1) / t * activation
    )
    # The gradients of norms, biases and positions stay one message per step, longer by this layer's share.
    vectors = {n: ("all_reduce", "tp", replicated_elements(style, layers=n) * FLOAT64) for n in (1, 2)}
    assert added == moves + Counter({vectors[2]: 1})
    assert replaced == Counter({vectors[1]: 1})


@pytest.mark.full
@pytest.mark.parametrize(
    ("bias", "t", "groups"),
    [
        pytest.param(bias, t, groups, marks=[] if bias and t == 2 * groups else pytest.mark.full)
        for t, groups in ((2, 1), (4, 1), (4, 2))
        for bias in (False, True)
    ],
)
def test_shared_key_and_value_heads_cost_one_sum_a_step(t: int, groups: int, bias: bool):
    """Among their ranks only: 2 d rows of h (and 2 d of bias) a layer, whatever the batch. No activation is gathered."""
    style = replace(LLAMA, num_query_groups=groups, add_qkv_bias=bias)
    activation, h, d = SEQ * BATCH * style.hidden_size * FLOAT64, style.hidden_size, style.head_width
    added, replaced = per_layer(Layout(tp=t, m=3), style)
    rows = {n: ("all_reduce", "kv", n * 2 * d * (h + bias) * FLOAT64) for n in (1, 2)}
    assert added == Counter({("all_reduce", "tp", activation // 3): 4 * 3, rows[2]: 1})
    assert replaced == Counter({rows[1]: 1})
    assert {c.ranks for c in calls_of_step(style, Layout(tp=t))[0] if c.axis == "kv"} == {t // groups}


def test_norms_of_heads_cost_one_sum_a_step():
    """Their weights are whole on every rank, which sees its own heads only."""
    added, replaced = per_layer(Layout(tp=2), replace(LLAMA, qk_layernorm=True))
    activation = SEQ * BATCH * LLAMA.hidden_size * FLOAT64
    weights = {n: ("all_reduce", "tp", n * 2 * LLAMA.head_width * FLOAT64) for n in (1, 2)}
    assert added == Counter({("all_reduce", "tp", activation): 4, weights[2]: 1})
    assert replaced == Counter({weights[1]: 1})


def replicated_elements(style, layers: int) -> int:
    """Elements of which each sequence-parallel rank has a partial gradient, by hand."""
    h = style.hidden_size
    if style is LLAMA:
        return (2 * layers + 1) * h
    return (6 * layers + 2) * h + SEQ * h


def test_embedding_and_output_layer_cost_what_the_table_says():
    """One layer less than none is left: embedding all-reduce, output layer's input gradient, three in the cross entropy."""
    token_grid, activation = SEQ * BATCH * FLOAT64, SEQ * BATCH * PLAIN.hidden_size * FLOAT64
    one_layer = Counter((c.op, c.axis, c.bytes) for c in calls_of_step(replace(PLAIN, num_layers=1), Layout(tp=2))[0])
    scalars = Counter({("all_reduce", "mp", FLOAT64): 1})
    assert one_layer == scalars + Counter(
        {("all_reduce", "tp", activation): 4 + 2, ("all_reduce", "tp", token_grid): 3}
    )
    divided = Counter(
        (c.op, c.axis, c.bytes) for c in calls_of_step(replace(PLAIN, num_layers=1), Layout(tp=2, sp=True))[0]
    )
    assert divided == scalars + Counter(
        {
            ("all_gather", "tp", activation // 2): 6
            + 3,  # embedding backward; output layer forward, and again for its weight
            ("reduce_scatter", "tp", activation): 4 + 2,  # embedding forward; output layer backward
            ("all_reduce", "tp", token_grid): 3,
            ("all_reduce", "tp", replicated_elements(PLAIN, 1) * FLOAT64): 1,
        }
    )


@pytest.mark.parametrize(("layout", "share"), [(Layout(pp=4, m=3), 1), (Layout(tp=2, sp=True, pp=4, m=3), 2)], ids=str)
def test_a_pipeline_boundary_costs_one_send_each_way_per_microbatch(layout: Layout, share: int):
    by_rank = calls_of_step(PLAIN, layout)
    boundary = SEQ * (BATCH // layout.m) * PLAIN.hidden_size * FLOAT64 // share
    for rank, calls in enumerate(by_rank):
        stage = rank // layout.tp
        transfers = Counter((c.op, c.axis, c.bytes) for c in calls if c.op in ("send", "recv"))
        expected = Counter()
        if stage < 3:
            expected += Counter({("send", "pp_forward", boundary): 3, ("recv", "pp_backward", boundary): 3})
        if stage > 0:
            expected += Counter({("recv", "pp_forward", boundary): 3, ("send", "pp_backward", boundary): 3})
        assert transfers == expected


def test_data_parallelism_costs_one_all_reduce_of_the_gradients():
    by_rank = calls_of_step(LLAMA, Layout(dp=4, m=2))

    def count(mesh):
        return sum(p.numel() for p in build(mesh, LLAMA, False)[0].parameters())

    (parameters,) = run_ranks({}, count)
    for calls in by_rank:
        assert Counter((c.op, c.axis, c.bytes) for c in calls) == Counter(
            {("all_reduce", "dp", parameters * FLOAT64): 1, ("all_reduce", "dp", REPORT): 1}
        )


def test_the_scalars_of_a_step_are_these():
    """TP 2 x PP 2 x DP 2: everything that is neither an activation nor a gradient."""
    for rank, calls in enumerate(calls_of_step(PLAIN, Layout(tp=2, pp=2, dp=2, m=2))):
        last_stage = rank >= 4
        small = Counter((c.op, c.axis, c.bytes) for c in calls if c.bytes <= REPORT)
        expected = Counter({(op, axis, size): 1 for (op, axis), size in SCALARS.items()})
        if last_stage:
            expected[("all_reduce", "dp", REPORT)] += 1
        assert small == expected


def test_a_tied_embedding_is_summed_once_between_the_ends():
    for rank, calls in enumerate(calls_of_step(PLAIN, Layout(tp=2, pp=4, m=3))):
        sums = [c.bytes for c in calls if c.axis == "embd"]
        ends = rank // 2 in (0, 3)
        assert sums == ([32 * PLAIN.hidden_size * FLOAT64] if ends else [])


def test_one_rank_communicates_nothing():
    assert calls_of_step(GPT2, Layout(m=3)) == [[]]


def test_three_fp32_and_three_bf16_parameters_lie_in_two_buffers_reduced_by_one_call_each():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            for i, dtype in enumerate([torch.float32, torch.bfloat16] * 3):
                self.register_parameter(f"p{i}", nn.Parameter(torch.full((4, 8 * (i + 1)), float(i), dtype=dtype)))

        def forward(self, x):
            return sum((p.float() * x).sum() for p in self.parameters())

    def work(mesh):
        model = DistributedDataParallel(Mixed(), mesh)
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        model(float(mesh["dp"].rank + 1)).backward()
        with mesh.ledger.record() as calls:
            model.start_grad_reduce()
            model.finish_grad_reduce()
        return model, storages, calls

    for model, storages, calls in run_ranks({"dp": 2}, work):
        assert len(model.buffers) == len(storages) == 2
        assert {b.params.dtype for b in model.buffers} == {torch.float32, torch.bfloat16}
        assert [c.op for c in calls] == ["all_reduce", "all_reduce"]
        assert all((p.main_grad == 3.0).all() for p in model.parameters()), "the sum of 1 and 2"
        for buffer in model.buffers:
            for p in buffer.parameters.values():
                inside = p.data_ptr() - buffer.params.data.data_ptr()
                assert 0 <= inside < buffer.params.numel * buffer.params.data.element_size()


def test_the_ring_remembers_the_last_calls():
    def work(mesh):
        chunk, keys = build(mesh, PLAIN, False)
        keys.samples = (0,)
        row = sample(0)
        chunk(row["tokens"][None], row["positions"][None], None, labels=row["labels"][None]).sum().backward()
        return mesh.ledger

    ledger = run_ranks({"tp": 2}, work)[0]
    assert len(ledger.flight_recorder) == 4 * PLAIN.num_layers + 5
    assert ledger.flight_recorder[-1].op == "all_reduce"


@pytest.mark.full
def test_the_communication_page_is_current():
    page = Path(__file__).parents[3] / "docs" / "communication.md"
    assert page.read_text() == document(), "run python tests/campaigns/communication_doc.py"
