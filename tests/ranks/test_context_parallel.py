"""Context parallelism: every way to communicate gives one process's numbers, in float64, with ranks as threads."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from layouts import Layout
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, SEQ, Outcome, Texts, assert_equal, run

from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.grid import Axis
from megatron.core.mesh import Mesh
from megatron.core.transformer.context_parallel import block_kernels
from megatron.core.transformer.context_parallel.method import ContextParallel
from megatron.core.transformer.model_config import ModelConfig

PLAIN = replace(GPT2, hidden_dropout=0.0, attention_dropout=0.0)
WINDOWS = replace(LLAMA, window_size="3,0", window_attn_skip_freq="2")
NUMBERS, MASKS = Texts(documents=True, as_mask=False), Texts(documents=True)
EACH = ("p2p", "all_gather", "a2a", "p2p")  # one for each layer


def zero(stage: int) -> DataParallelConfig:
    return DataParallelConfig(zero_stage=stage, overlap_grad_reduce=stage > 1)


CASES: dict[str, tuple[ModelConfig, Texts, Layout]] = {
    "ring": (GPT2, Texts(), Layout(cp=2, delayed=True)),
    "ring of 4, grouped queries": (LLAMA, Texts(), Layout(cp=4, delayed=True)),
    "flash ring of 4, zb-h1": (PLAIN, Texts(), Layout(cp=4, pp=2, m=2, schedule="zb-h1", delayed=True)),
    "gathered, sp, documents": (GPT2, NUMBERS, Layout(cp=2, cp_types=("all_gather",), tp=2, sp=True)),
    "gathered, recomputed, ZeRO 1": (
        PLAIN,
        Texts(),
        Layout(cp=2, cp_types=("all_gather",), dp=2, recompute="selective", data_parallel=zero(1)),
    ),
    "heads, interleaved": (LLAMA, NUMBERS, Layout(cp=4, cp_types=("a2a",), pp=2, v=2, m=2, schedule="interleaved")),
    "heads, tp, ZeRO 2": (GPT2, MASKS, Layout(cp=2, cp_types=("a2a",), tp=2, dp=2, data_parallel=zero(2))),
    "one for each layer, ZeRO 3": (GPT2, MASKS, Layout(cp=2, cp_types=EACH, dp=2, data_parallel=zero(3))),
    "one for each layer, windows, all recomputed": (
        WINDOWS,
        Texts(),
        Layout(cp=2, cp_types=EACH, recompute="uniform 2"),
    ),
    "ring of 4, windows and documents": (WINDOWS, NUMBERS, Layout(cp=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shared_sequence_gives_the_numbers_of_one_process(name: str, computed: Counter):
    model, texts, layout = CASES[name]
    assert_equal(run(model, layout, global_batch=4, steps=2, texts=texts), one_process(model, texts), 1e-10)
    over_blocks = "a2a" not in layout.cp_types or len(layout.cp_types) > 1
    flash = over_blocks and model.attention_dropout == 0 and texts == Texts()
    assert bool(computed["FlashBlocks"]) == flash
    assert bool(computed["TiledBlocks"]) == (over_blocks and (not flash or model is WINDOWS))


def one_process(model: ModelConfig, texts: Texts) -> Outcome:
    return run(model, Layout(), global_batch=4, steps=2, texts=texts)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each kernel of blocks has run."""
    found: Counter = Counter()
    for kind in (block_kernels.FlashBlocks, block_kernels.TiledBlocks):

        def add(self, *arguments, kind=kind, before=kind.add):
            found[kind.__name__] += 1
            return before(self, *arguments)

        monkeypatch.setattr(kind, "add", add)
    return found


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
    from megatron.core.transformer.context_parallel.merged import Ring

    def work(mesh: Mesh) -> list[str]:
        said: list[str] = []

        def visit(chunks: tuple[int, ...], here: torch.Tensor) -> torch.Tensor:
            said.append(f"block {chunks} after {len(mesh.ledger.recent)} hops")
            return torch.zeros_like(here)

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


def test_a_rank_that_is_given_all_tokens_says_what_to_do():
    rows = ContextParallel(Axis("cp", (0, 1), 0), longest=SEQ)
    rows.check(SEQ)
    with pytest.raises(ValueError, match=r"given 8 tokens of each sample .* a sample has 8; cut the batch"):
        rows.check(2 * SEQ)
