"""Context parallelism: every way to communicate gives one process's numbers, in float64, with ranks as threads."""

from functools import partial
from itertools import combinations, product
from pathlib import Path

import context_matrix
import pytest
import torch
from context_matrix import DIMENSIONS, NEW, RANKS, ContextCase, covering_cases, main, outcomes
from layouts import Layout
from local_ranks import run_ranks
from parity_cases import TOLERANCE
from tiny_run import LLAMA, SEQ, assert_equal, run

from megatron.core.base.async_handle import AsyncHandle
from megatron.core.context_parallel.cp_attention import METHODS, AttentionInputs, ContextParallel
from megatron.core.ops.attention.kernels import unfused_attention
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys
from megatron.core.ops.shard_sequence import shard_sequence
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis


@pytest.mark.parametrize("case", covering_cases(2, NEW), ids=str)
def test_a_shared_sequence_gives_the_numbers_of_one_process(case: ContextCase):
    """With the calls of the type's formula, and its kernels; tests/campaigns/context_matrix.py runs the other pairs, and triples."""
    assert_equal(*outcomes(case, steps=1), TOLERANCE)


@pytest.mark.full
def test_the_cases_have_every_pair_and_triple_that_fits():
    sizes = {name: len(choices) for name, choices in DIMENSIONS.items()}
    pairs = {pair for case in covering_cases(2, NEW) for pair in combinations(zip(DIMENSIONS, case.choices), 2)}
    new = [pair for pair in combinations(DIMENSIONS, 2) if {*pair} & {*NEW}]
    for names in new:
        assert sum(tuple(name for name, _ in pair) == names for pair in pairs) == sizes[names[0]] * sizes[names[1]]
    triples = {three for case in covering_cases(3) for three in combinations(zip(DIMENSIONS, case.choices), 3)}
    apart = [{("zero", stage), ("beside", what)} for stage in (2, 3) for what in ("muon", "fixed order")]
    apart += [{("beside", "offload"), ("recompute", what)} for what in DIMENSIONS["recompute"] if what != "none"]
    apart += [{("beside", "offload"), ("zero", 0)}, {("beside", "options"), ("positions", "learned")}]
    tied = {("pipeline", "zb-v"), ("positions", "learned")}
    apart += [tied | {("zero", 3)}, tied | {("beside", "fixed order")}]
    every = (
        {*zip(names, chosen)}
        for names in combinations(DIMENSIONS, 3)
        for chosen in product(*map(DIMENSIONS.get, names))
    )
    everything = sum(not any(refused <= three for refused in apart) for three in every)
    assert len(triples) == everything and max(case.ranks for case in covering_cases(3)) == RANKS
    assert len({str(case) for case in covering_cases(3)}) == len(covering_cases(3))


def test_the_command_goes_on_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases, path, page = list(covering_cases(2, NEW)[:2]), tmp_path / "results.jsonl", tmp_path / "page.md"
    monkeypatch.setattr(context_matrix, "covering_cases", lambda strength, only=(): tuple(cases))
    found = {str(cases[0]): (1e-14, "losses of step 0"), str(cases[1]): (1e-3, "weight w")}
    monkeypatch.setattr(context_matrix, "worst_difference", lambda case: found[str(case)])
    assert main([str(path), "--only", str(cases[0])]) == 0
    assert main([str(path)]) == 1
    assert len(path.read_text().splitlines()) == 2
    assert main([str(path), "--report", str(page)]) == 1
    assert "**2 of 2 cases have been run; 1 differ.**" in page.read_text()
    assert f"DIFFERS: `{cases[1]}`: weight w, 0.001" in page.read_text()


BYTES = 8  # of an element
CALLS = {  # of one layer and one microbatch of 2 samples: (op, bytes) -> how often; groups and heads are 4 and 8, of 4 features
    "p2p": {("send", 2 * SEQ // 2 * 2 * 16 * BYTES): 1 + 1 + 2},
    "all_gather": {("all_gather", 2 * SEQ // 2 * 2 * 16 * BYTES): 1, ("reduce_scatter", 2 * SEQ * 2 * 16 * BYTES): 1},
    "a2a": {("all_to_all", SEQ // 2 * 2 * 32 * BYTES): 4, ("all_to_all", SEQ // 2 * 2 * 16 * BYTES): 4},
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_layer_sends_what_the_formula_says(kind: str):
    layout = Layout(cp=2, cp_types=(kind,))
    for _, calls in run(LLAMA, layout, global_batch=2, steps=1).calls:
        over_cp = {(op, nbytes): count for (op, axis, nbytes), count in calls.items() if axis == "cp"}
        assert over_cp == {call: LLAMA.num_layers * count for call, count in CALLS[kind].items()}


def test_the_next_hop_begins_before_the_block_beside_it(monkeypatch: pytest.MonkeyPatch):
    from megatron.core.context_parallel.ring_and_allgather_attention import Ring

    def work(mesh: Mesh) -> list[str]:
        said: list[str] = []

        def visit(chunks: tuple[int, ...], here: torch.Tensor, arriving: AsyncHandle | None = None) -> torch.Tensor:
            said.append(f"block {chunks} after {len(mesh.ledger.flight_recorder)} hops")
            return torch.zeros_like(here) if arriving is None else arriving.wait()

        axis: Axis = mesh["cp"]
        saved = Ring(axis).forward(torch.full((2, 1), float(axis.rank)), visit)
        assert Ring(axis).backward(saved, visit).shape == saved.shape
        return said

    first, _ = run_ranks({"cp": 2}, work, delayed=True)
    assert first == [
        "block (0, 3) after 1 hops",
        "block (1, 2) after 1 hops",
        "block (0, 3) after 2 hops",
        "block (1, 2) after 3 hops",
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_no_wait_of_the_ring_is_missing(kind: str, dtype: torch.dtype):
    """Transfers that complete at their wait, and poison their result until then, change no bit of result or gradients."""
    late, soon = (
        run_ranks({"cp": 3}, partial(attention_of, kind, dtype), delayed=delayed) for delayed in (True, False)
    )
    for mine, expected in zip(late, soon):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def attention_of(kind: str, dtype: torch.dtype, mesh: Mesh) -> list[torch.Tensor]:
    """The result and the gradients of q, k and v of my rows, of 2 samples of 24 tokens."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs = [shard_sequence(draw(24, 2, heads, 4), mesh["cp"], dim=0).to(dtype) for heads in (6, 3, 3)]
    q, k, v = (x.requires_grad_() for x in inputs)
    dropout = AttentionDropout(0.0, SampleDropoutKeys(0), 0, 0)
    cp = ContextParallel(mesh["cp"])
    out = METHODS[kind].attend(AttentionInputs(q, k, v, None, dropout, "auto", unfused_attention), cp)
    out.backward(out.detach().sin())
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("kind", METHODS)
def test_a_row_that_sees_no_key_gives_0_and_no_gradient(kind: str):
    """As torch's fused kernel has it: such as the rows of padding, under a mask that hides padding from itself."""
    draw = partial(torch.randn, 8, 2, 4, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    whole, hidden = [draw() for _ in range(3)], torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    hidden[0, :, 6:], hidden[0, :, :, 6:], hidden[1, :, 2] = True, True, True
    dropout = AttentionDropout(0.0, SampleDropoutKeys(0), 0, 0)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=~mask).permute(2, 0, 1, 3)

    def work(mesh: Mesh) -> list[torch.Tensor]:
        q, k, v = (shard_sequence(x, mesh["cp"], dim=0).requires_grad_() for x in whole)
        cp = ContextParallel(mesh["cp"], heads=mesh["cp_heads"], ring=mesh["cp_ring"])
        mask = shard_sequence(hidden, mesh["cp"], dim=2)
        out = METHODS[kind].attend(AttentionInputs(q, k, v, mask, dropout, "auto", kernel), cp)
        out.sin().sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    q, k, v = (x.clone().requires_grad_() for x in whole)
    expected = kernel(q, k, v, hidden)
    expected.sin().sum().backward()
    assert not expected[6:, 0].any() and not expected[2, 1].any()
    for rank, got in enumerate(run_ranks({"cp": 4, "cp_heads": 2}, work)):
        mine = Axis("cp", tuple(range(4)), rank)
        for x, y in zip(got, (expected.detach(), q.grad, k.grad, v.grad), strict=True):
            torch.testing.assert_close(x, shard_sequence(y, mine, dim=0), rtol=0, atol=1e-14)


def test_a_rank_that_is_given_all_tokens_says_what_to_do():
    rows = ContextParallel(Axis("cp", (0, 1), 0), longest=SEQ)
    rows.check(SEQ)
    with pytest.raises(
        ValueError, match=r"given 8 tokens of each sample, but a complete sample has only 8: the batch is not sharded"
    ):
        rows.check(2 * SEQ)
