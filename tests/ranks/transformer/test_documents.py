"""Packed documents that do not see each other: as each alone, and the same under every layout. Float64, 1e-10 as in test_parity."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from local_ranks import run_ranks
from tiny_run import GPT2, LLAMA, SEQ, VOCAB, Layout, Outcome, Texts, assert_equal, build, run
from torch import Tensor

from megatron.core.ops.attention.document_and_window_masks import Documents

TOLERANCE = 1e-10
LEARNED = replace(GPT2, num_layers=4, hidden_dropout=0.0, attention_dropout=0.0)
WINDOWS = replace(LLAMA, init_method_std=0.3, window_size="2,0", window_attn_skip_freq="4")
CONFIGS = {"learned positions": LEARNED, "rotary positions": LLAMA, "dropout": GPT2, "windows": WINDOWS}
PACKED, MASKED = Texts(documents=True, as_mask=False), Texts(documents=True)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["fused", "unfused"])
@pytest.mark.parametrize("name", ["learned positions", "rotary positions", "windows"])
def test_a_packed_document_computes_what_it_computes_alone(name: str, backend: str):
    lengths = [[3, 1, 4], [8], [1, 7]]
    tokens = torch.randint(0, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])

    def scores(mesh) -> tuple[Tensor, list[Tensor]]:
        model = build(mesh, replace(CONFIGS[name], attention_backend=backend), False)[0].module.eval()
        packed = model(tokens, positions, Documents(numbers))
        alone = []
        for row, parts in zip(tokens, lengths):
            documents = [model(part[None], torch.arange(len(part))[None]) for part in row.split(parts)]
            alone.append(torch.cat(documents, dim=1))
        return packed, torch.cat(alone)

    with torch.no_grad():
        packed, alone = run_ranks({}, scores)[0]
    assert (packed - alone).abs().max() <= TOLERANCE * alone.abs().max()


@cache
def one_process(name: str, texts: Texts) -> Outcome:
    return run(CONFIGS[name], Layout(), steps=2, global_batch=8, texts=texts)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_documents_train_as_their_mask_does(name: str):
    assert_equal(one_process(name, PACKED), one_process(name, MASKED), TOLERANCE)


LAYOUTS = [
    Layout(tp=2, sp=True, m=2),
    Layout(pp=4, m=4),
    pytest.param(Layout(tp=2, pp=2, v=2, m=2, dp=2, schedule="interleaved"), marks=pytest.mark.full),
    Layout(recompute="uniform 2", m=2),
    Layout(recompute="selective", pp=2, m=2),
]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_documents_under_a_layout_equal_one_process(layout: Layout):
    assert_equal(run(GPT2, layout, steps=2, global_batch=8, texts=PACKED), one_process("dropout", PACKED), TOLERANCE)
    assert_equal(
        run(LLAMA, layout, steps=2, global_batch=8, texts=PACKED), one_process("rotary positions", PACKED), TOLERANCE
    )
