"""Corners of the model: few query groups, norms of heads, odd vocabularies, the terms of the loss. Any layout, same numbers.

The tolerance is that of test_parity: 1e-10 of a tensor's largest value, in float64.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, VOCAB, Layout, Outcome, Texts, assert_equal, build, my_pieces, put_together, run
from torch.nn import functional as F

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import open_checkpoint, save_checkpoint
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.sharding.boxes import slices
from megatron.core.sharding.placement import pieces
from megatron.core.tensor_parallel.cross_entropy import sharded_cross_entropy
from megatron.core.tensor_parallel.linear_layers import TensorParallel
from megatron.core.transformer.attention import ParallelAttention
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.core.transformer.model_config import ModelConfig
from megatron.training.arguments.command_line import parse_args
from megatron.training.arguments.validation import check
from megatron.training.checkpointing.save_and_load_run_state import sharded_model_state, sharded_optimizer_state

pytestmark = pytest.mark.full  # the fast set keeps the covering pairs of test_parity.py

TOLERANCE = 1e-10
SMALL_GPT2, SMALL_LLAMA = replace(GPT2, num_layers=2), replace(LLAMA, num_layers=2)
TWO_GROUPS = replace(SMALL_LLAMA, num_query_groups=2)
ONE_GROUP = replace(SMALL_LLAMA, num_query_groups=1)
CORNERS: dict[str, tuple[ModelConfig, Texts]] = {
    "two groups": (TWO_GROUPS, Texts()),
    "two groups, biases, dropout": (
        replace(SMALL_GPT2, group_query_attention=True, num_query_groups=2, add_qkv_bias=True),
        Texts(),
    ),
    "one group": (ONE_GROUP, Texts()),
    "one group, qkv bias, norm of heads": (replace(ONE_GROUP, add_qkv_bias=True, qk_layernorm=True), Texts()),
    "qkv bias": (replace(SMALL_LLAMA, add_qkv_bias=True), Texts()),
    # With rotary positions: without them the gradient of a key's bias is zero but for rounding, and nothing to compare.
    "LayerNorm of heads": (replace(SMALL_GPT2, qk_layernorm=True, position_embedding_type="rope"), Texts()),
    "gated MLP with biases": (replace(SMALL_LLAMA, add_bias_linear=True), Texts()),
    "wide heads": (replace(TWO_GROUPS, kv_channels=6, qk_layernorm=True), Texts()),
    "5 words": (SMALL_GPT2, Texts(vocab=5)),
    "64 words": (replace(SMALL_LLAMA, untie_embeddings_and_output_weights=False), Texts(vocab=64)),
    "1 word": (replace(SMALL_LLAMA, z_loss_coeff=0.1, label_smoothing=0.1), Texts(vocab=1)),
    "label smoothing": (replace(SMALL_GPT2, label_smoothing=0.1), Texts()),
    "z-loss": (replace(SMALL_LLAMA, z_loss_coeff=0.01), Texts()),
    "both, 5 words": (replace(SMALL_GPT2, label_smoothing=0.2, z_loss_coeff=0.01), Texts(vocab=5)),
    "masks": (SMALL_LLAMA, Texts(documents=True)),
    "masks, two groups": (replace(TWO_GROUPS, attention_backend="unfused"), Texts(documents=True)),
    "all at once": (
        replace(
            TWO_GROUPS,
            add_bias_linear=True,
            qk_layernorm=True,
            label_smoothing=0.1,
            z_loss_coeff=0.01,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            kv_channels=6,
            untie_embeddings_and_output_weights=False,
        ),
        Texts(vocab=37, documents=True),
    ),
}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4),
    Layout(tp=4, sp=True),
    Layout(pp=2, m=2),
    Layout(dp=2, m=2),
]
COMBINED = Layout(tp=4, sp=True, pp=2, dp=2, m=2, delayed=True)


@cache
def one_process(corner: str) -> Outcome:
    config, texts = CORNERS[corner]
    return run(config, Layout(), steps=2, global_batch=8, texts=texts)


def assert_layout_changes_nothing(corner: str, layout: Layout) -> None:
    config, texts = CORNERS[corner]
    assert_equal(run(config, layout, steps=2, global_batch=8, texts=texts), one_process(corner), TOLERANCE)


@pytest.mark.parametrize(("layout", "corner"), list(product(LAYOUTS, CORNERS)), ids=str)
def test_layout_equals_one_process(layout: Layout, corner: str):
    assert_layout_changes_nothing(corner, layout)


@pytest.mark.parametrize("corner", ["two groups, biases, dropout", "one group, qkv bias, norm of heads", "all at once"])
def test_all_axes_and_late_groups_equal_one_process(corner: str):
    assert_layout_changes_nothing(corner, COMBINED)


# ---------------------------------------------------------------- query groups fewer than ranks


def test_a_rank_holds_its_queries_and_its_groups_key_and_value():
    """8 heads of width 4 in 2 groups on 4 ranks: rows in heads  q0 q1 q2 q3 k v | q4 q5 q6 q7 k v."""
    held = run_ranks({"tp": 4}, lambda mesh: build(mesh, TWO_GROUPS, False)[0].module, ranks_per_kv_head=2)
    name = "language_model.decoder.layers.0.self_attention.linear_qkv.weight"
    heads = [
        [(rows.start // 4, rows.stop // 4) for rows in module.get_parameter(name).placement.rows] for module in held
    ]
    assert heads == [[(0, 2), (4, 6)], [(2, 4), (4, 6)], [(6, 8), (10, 12)], [(8, 10), (10, 12)]]


@pytest.mark.parametrize("kv", [1, 4])
def test_an_axis_of_another_size_is_refused(kv: int):
    with pytest.raises(RuntimeError, match=r"(?s)2.*4.*2.*[14]"):
        run_ranks({"tp": 4}, lambda mesh: build(mesh, TWO_GROUPS, False), ranks_per_kv_head=kv)


def test_a_layer_without_the_axis_is_refused():
    def attention(mesh):
        return ParallelAttention(ONE_GROUP, 0, LayerContext(TensorParallel(mesh["tp"]), SampleDropoutKeys(0)))

    with pytest.raises(RuntimeError, match=r"(?s)1.*initialize_model_parallel"):
        run_ranks({"tp": 2}, attention, ranks_per_kv_head=2)


def test_ranks_per_head_divide_the_tensor_parallel_ranks():
    with pytest.raises(RuntimeError, match=r"(?s)3.*key/value.*4"):
        run_ranks({"tp": 4}, lambda mesh: None, ranks_per_kv_head=3)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-tp-dp"])
def test_neighbours_share_a_head_in_any_rank_order(order: str):
    meshes = run_ranks({"tp": 4, "pp": 2}, lambda mesh: mesh, order=order, ranks_per_kv_head=2)
    for mesh in meshes:
        first = mesh["tp"].rank // 2 * 2
        assert mesh["kv"].ranks == mesh["tp"].ranks[first : first + 2]
        assert mesh["kv"].rank == mesh["tp"].rank % 2


def command_line(groups: int, tp: int) -> list[str]:
    return (
        f"--num-layers 2 --hidden-size 48 --num-attention-heads 12 --group-query-attention --num-query-groups {groups} "
        f"--tensor-model-parallel-size {tp} --micro-batch-size 1 --train-iters 1 --seq-length 8 --lr 1 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 60"
    ).split()


@pytest.mark.parametrize(("groups", "tp", "sharing"), [(1, 4, 4), (2, 4, 2), (4, 4, 1), (12, 4, 1), (3, 6, 2)])
def test_groups_that_divide_the_ranks_are_accepted(groups: int, tp: int, sharing: int):
    config, _, _ = parse_args(command_line(groups, tp))
    check(config, world_size=tp)
    assert config.transformer.ranks_per_kv_head(tp) == sharing


@pytest.mark.parametrize(("groups", "tp"), [(3, 4), (6, 4), (4, 3), (4, 6)])
def test_other_groups_are_refused_in_the_users_words(groups: int, tp: int):
    config, _, _ = parse_args(command_line(groups, tp))
    expected = (
        rf"^--num-query-groups \({groups}\) must be a multiple of --tensor-model-parallel-size \({tp}\), so that .*"
    )
    with pytest.raises(ConfigError, match=expected):
        check(config, world_size=tp)


STORED = replace(TWO_GROUPS, add_qkv_bias=True, qk_layernorm=True, untie_embeddings_and_output_weights=False)


def fill(chunk, adam: FlatOptimizer, factor: float) -> None:
    """Weights times `factor`, and moments that follow from them, so that each layout can make the same ones by itself."""
    for name, p in chunk.module.named_parameters():
        p.data.mul_(factor)
        for i, kind in enumerate(("exp_avg", "exp_avg_sq")):
            adam.tensors()[kind][name].copy_(p.data * (i + 2))


def store(mesh, root: Path, sp: bool) -> list[tuple]:
    chunk, _ = build(mesh, STORED, sp)
    adam = FlatOptimizer(chunk.buffers, OptimizerConfig(), mesh)
    fill(chunk, adam, 1.0)
    save_checkpoint(
        root, 1, sharded_model_state([chunk], mesh) | sharded_optimizer_state(adam, mesh), {}, mesh["world"]
    )
    return my_pieces(chunk.module, mesh, lambda p: p.data)


def read(mesh, root: Path, sp: bool, expected: dict[str, torch.Tensor]) -> None:
    """Every element that a rank holds, shared or not, is the stored one."""
    chunk, _ = build(mesh, STORED, sp)
    adam = FlatOptimizer(chunk.buffers, OptimizerConfig(), mesh)
    fill(chunk, adam, float("nan"))
    tensors = sharded_model_state([chunk], mesh) | sharded_optimizer_state(adam, mesh)
    open_checkpoint(root, world=mesh["world"]).read_into(tensors, mesh["world"])
    for name, p in chunk.module.named_parameters():
        for box, local in pieces(p.placement, tuple(p.shape), mesh):
            whole = expected[name][slices(box)]
            for factor, held in (
                (1, p.data),
                (2, adam.tensors()["exp_avg"][name]),
                (3, adam.tensors()["exp_avg_sq"][name]),
            ):
                assert torch.equal(held[slices(local)], whole * factor), name


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Layout(tp=4, sp=True), Layout()),
        (Layout(), Layout(tp=4)),
        (Layout(tp=4, dp=2), Layout(tp=2, pp=2)),
        (Layout(tp=8), Layout(tp=4, sp=True)),
    ],
    ids=str,
)
def test_a_checkpoint_with_shared_heads_is_read_in_any_layout(saved: Layout, loaded: Layout, tmp_path: Path):
    def each_rank(layout: Layout, work):
        sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
        return run_ranks(sizes, work, ranks_per_kv_head=STORED.ranks_per_kv_head(layout.tp))

    parts = each_rank(saved, partial(store, root=tmp_path, sp=saved.sp))
    each_rank(loaded, partial(read, root=tmp_path, sp=loaded.sp, expected=put_together(parts)))


# ---------------------------------------------------------------- the terms of the loss


def losses_and_gradient(logits: torch.Tensor, labels: torch.Tensor, words: int, t: int, **terms: float):
    """Each rank's losses, and the gradient of a weighted sum of them with respect to all columns, padding included."""
    weights = torch.linspace(0.5, 2, labels.numel(), dtype=torch.float64).view_as(labels)

    def work(mesh):
        mine = logits.chunk(t, dim=-1)[mesh["tp"].rank].clone().requires_grad_()
        losses = sharded_cross_entropy(mine, labels, mesh["tp"], words, **terms)
        (losses * weights).sum().backward()
        return losses.detach(), mine.grad

    ranks = run_ranks({"tp": t}, work)
    return weights, [losses for losses, _ in ranks], torch.cat([grad for _, grad in ranks], dim=-1)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize("words", [1, 2, 5, 61, 64])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.3, 0.1)])
def test_loss_and_gradient_equal_torchs(smoothing: float, z_loss: float, words: int, t: int):
    """Torch gives e / K to every word, Megatron e / (K - 1) to every other one: e' = e K / (K - 1) is the same."""
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(
        4, 3, 64, generator=generator, dtype=torch.float64
    )  # [s, b, v], with padding behind `words`
    labels = torch.randint(0, words, (4, 3), generator=generator)
    terms = {"label_smoothing": smoothing, "z_loss": z_loss}
    weights, by_rank, gradient = losses_and_gradient(logits, labels, words, t, **terms)

    x = logits[..., :words].clone().requires_grad_()
    torchs = smoothing * words / (words - 1) if words > 1 else 0.0
    expected = F.cross_entropy(x.permute(0, 2, 1), labels, label_smoothing=torchs, reduction="none")
    expected = expected + z_loss * torch.logsumexp(x, dim=-1) ** 2
    (expected * weights).sum().backward()
    for losses in by_rank:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient[..., :words], x.grad, rtol=1e-12, atol=1e-14)
    assert not gradient[..., words:].any(), "padding has no gradient"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_costs_three_sums_whatever_its_terms(smoothing: float):
    def work(mesh):
        with mesh.ledger.record() as calls:
            logits = torch.randn(4, 3, 32, requires_grad=True)
            losses = sharded_cross_entropy(
                logits, torch.zeros(4, 3, dtype=torch.long), mesh["tp"], VOCAB, label_smoothing=smoothing, z_loss=0.1
            )
            losses.sum().backward()
        return [(c.op, c.bytes) for c in calls]

    assert run_ranks({"tp": 2}, work)[0] == [("all_reduce", 4 * 3 * 4)] * 3


# ---------------------------------------------------------------- the residual stream in float32


WIDE = replace(SMALL_LLAMA, fp64=False, bf16=True, fp32_residual_connection=True)


@cache
def half_precision(config: ModelConfig, layout: Layout) -> Outcome:
    return run(config, layout, steps=1, global_batch=8)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(tp=4, sp=True)], ids=str)
def test_a_float32_residual_in_bfloat16_equals_one_process_to_rounding(layout: Layout):
    """A pipeline moves the float32 stream unrounded, so no bit changes but in the norm's order of summation. Tensor
    parallelism rounds each rank's part of a sum to bfloat16, 2^-9 of it, a few dozen times on the way to a gradient: the
    largest difference found is 1.1 %."""
    got, expected = half_precision(WIDE, layout), half_precision(WIDE, Layout())
    assert_equal(replace(got, weights={}), replace(expected, weights={}), 2.0**-5 if layout.tp > 1 else 1e-12)


def test_a_float32_residual_keeps_depth_from_rounding_gradients():
    """Mean relative error of the gradients against float64 at 16 layers: 0.6 % with a float32 stream, 1.2 % without. At 2
    layers it is 0.5 % and 0.6 %: only the rounded stream gets worse with depth."""
    deep = replace(LLAMA, num_layers=16)
    half = replace(deep, fp64=False, bf16=True)
    exact = run(deep, Layout(), steps=1, global_batch=8).grads[0]

    def error(config: ModelConfig) -> float:
        grads = half_precision(config, Layout()).grads[0]
        return sum(((grads[name] - g).norm() / g.norm()).item() for name, g in exact.items()) / len(exact)

    assert 1.5 * error(replace(half, fp32_residual_connection=True)) < error(half) < 0.02


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_blocks_compute_in_half_precision_and_the_stream_is_float32(kind: str):
    config = replace(SMALL_GPT2, fp64=False, **{kind: True}, fp32_residual_connection=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    assert (config.params_dtype, config.residual_dtype) == (dtype, torch.float32)
    seen: dict[str, set] = {}

    def note(name: str, module, inputs, output) -> None:
        seen.setdefault(name, set()).add((output[0] if isinstance(output, tuple) else output).dtype)

    def work(mesh):
        chunk, keys = build(mesh, config, False)
        for name, module in chunk.module.named_modules():
            module.register_forward_hook(partial(note, name.split(".")[-1]))
        keys.samples = (0,)
        ids = torch.arange(8)[None]
        chunk(ids, ids, None, labels=ids).sum().backward()
        assert all(p.main_grad.dtype == torch.float32 and p.main_grad.isfinite().all() for p in chunk.parameters())

    run_ranks({}, work)
    for name in ("embedding", "0", "1"):  # the numbers are layers
        assert seen[name] == {torch.float32}, name
    for name in ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp", "final_layernorm", "output_layer"):
        assert seen[name] == {dtype}, name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 and --fp16 exclude each other; give only one of them"),
        ({"fp16": True, "fp64": True}, "--fp16 and --fp64 exclude each other; give only one of them"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection needs --bf16 or --fp16"),
        ({"label_smoothing": 1.0}, r"--label-smoothing is 1.0; it must be in \[0, 1\)"),
        ({"z_loss_coeff": -1.0}, "--z-loss-coeff is -1.0; it must not be negative"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**given)


def test_flags_of_half_precision_are_accepted():
    config, _, notes = parse_args(
        [*command_line(12, 1), "--fp16", "--apply-query-key-layer-scaling", "--attention-softmax-in-fp32"]
    )
    assert config.transformer.params_dtype == torch.float16
    assert [flag for note in notes for flag in note.split(": ")[1].split()] == [
        "--apply-query-key-layer-scaling",
        "--attention-softmax-in-fp32",
    ]
