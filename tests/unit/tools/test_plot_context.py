"""tools/plot_context.py: the drawing against a causal mask, the bytes against what is counted of a run, and the page."""

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from documents import ROOT, commands_of
from said import tells

from tools.drawing.page import Shape, bytes_sent, page
from tools.drawing.ring import chunks_of, owner_of_keys, pairs_in, svg_of, text_of_ring, text_of_scores
from tools.plot_context import main

PAGE = ROOT / "docs/context_parallel.md"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_each_pair_that_a_causal_mask_shows_is_computed_once_and_no_other(ranks):
    chunks = 1 if ranks == 1 else 2 * ranks
    seen = [
        (pair, half)
        for rank in range(ranks)
        for step in range(ranks)
        for pair, half in pairs_in(rank, step, ranks).items()
    ]
    assert sorted(seen) == [((row, key), row == key) for row in range(chunks) for key in range(row + 1)]
    for step in range(1, ranks):
        assert {len(pairs_in(rank, step, ranks)) for rank in range(ranks)} == {2}


def test_a_ring_of_two_as_text(capsys):
    assert text_of_ring(2) == [
        "         step 0             step 1",
        "rank 0   0 x 0/, 3 x 0 3/   3 x 1 2",
        "           keys of 0 -> 1     sends nothing",
        "rank 1   1 x 1/, 2 x 1 2/   1 2 x 0",
        "           keys of 1 -> 0     sends nothing",
    ]
    assert text_of_scores(2)[-1] == "rank 1, queries of 2    1  0  0/ ."
    assert main(["--context-parallel-size", "2"]) == 0
    assert "\n".join(text_of_ring(2)) in capsys.readouterr().out


def test_the_drawing_sends_what_the_ring_sends(monkeypatch):
    """The ring itself, each rank alone: the chunks that it visits, and how often it sends."""
    from megatron.core.base.async_handle import done
    from megatron.core.context_parallel import ring_and_allgather_attention
    from megatron.core.parallel.rank_grid import Axis

    sent = []
    monkeypatch.setattr(
        ring_and_allgather_attention.collectives, "start_shift", lambda x, axis: sent.append(x) or done(x)
    )
    for rank in range(4):
        visited = []
        ring_and_allgather_attention.Ring(Axis("cp", (0, 1, 2, 3), rank)).forward(
            None, lambda chunks, x, to=visited: to.append(chunks)
        )
        assert visited == [chunks_of(owner_of_keys(rank, step, 4), 4) for step in range(4)]
    assert len(sent) == 4 * sum("keys of" in cell for cell in text_of_ring(4)[2].split("   "))


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize(("ranks", "heads", "groups"), [(2, 4, 4), (4, 8, 2), (4, 4, 4)])
def test_bytes_are_those_that_campaigns_count(kind, ranks, heads, groups):
    """context_matrix.py has the calls of each type, which its cases compare with the ledger of a run."""
    from context_matrix import BATCH, BYTES, SEQ, _of_layer

    model = SimpleNamespace(num_attention_heads=heads, query_groups=groups, head_width=8)
    layout = SimpleNamespace(tp=1, m=1, recompute="none", cp_heads=2)
    calls = _of_layer(SimpleNamespace(layout=layout, model=model, cp=ranks, dp=1, texts="one text"), kind, False)
    size = {"cp": ranks, "cp_heads": 2, "cp_ring": ranks // 2}
    share = {
        "send": lambda n: 1,
        "all_gather": lambda n: n - 1,
        "reduce_scatter": lambda n: (n - 1) / n,
        "all_to_all": lambda n: (n - 1) / n,
    }
    counted = sum(count * amount * share[op](size[axis]) for (op, axis, amount), count in calls.items())
    assert sum(bytes_sent(kind, ranks, Shape(SEQ, BATCH, heads, groups, 8, BYTES, BYTES))) == counted


def test_in_half_precision_the_ring_sends_the_bytes_of_the_page(monkeypatch):
    """Sums in float32 until they are complete; the last hop brings them home as the keys are."""
    import torch

    from megatron.core.base.async_handle import done
    from megatron.core.context_parallel import ring_and_allgather_attention
    from megatron.core.parallel.rank_grid import Axis

    sent = []
    monkeypatch.setattr(
        ring_and_allgather_attention.collectives, "start_shift", lambda x, axis: sent.append(x.nbytes) or done(x)
    )
    keys = torch.zeros(2, 1, 2, 16, 8, dtype=torch.bfloat16)  # keys and values of 1 sample, 2 heads, 64 / 4 rows
    ring = ring_and_allgather_attention.Ring(Axis("cp", (0, 1, 2, 3), 1))
    home = ring.backward(keys, lambda chunks, here, arriving: torch.zeros_like(here, dtype=torch.float32))
    assert sum(sent) == bytes_sent("p2p", 4, Shape(64, 1, 2, 2, 8))[1] and home.dtype == torch.bfloat16


def test_the_commands_of_the_page_draw(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands_of(PAGE):
        assert main(command.split()[2:]) == 0
    assert (tmp_path / "plots/ring.svg").read_text() == svg_of(8)
    assert len(ElementTree.fromstring(svg_of(8)).findall("{*}polygon")) == 16 * 17 // 2


def test_a_mistake_is_told_in_one_line(capsys):
    assert main(["--context-parallel-size", "0"]) == 2
    assert tells(capsys.readouterr().err, "plot_context --context-parallel-size 0")


def test_the_drawings_of_the_page_are_current(monkeypatch):
    text = PAGE.read_text()
    monkeypatch.setattr("tools.drawing.page._rows_of_memory", lambda: rows_of_memory(text))
    assert page() == text, "run: python tools/plot_context.py --write-docs docs/context_parallel.md"


def rows_of_memory(text: str) -> list[str]:
    section = text.split("## Memory against length")[1].split("\n\n## ")[0]
    return section.strip().split("|---|---|---|---|---|\n")[1].splitlines()


@pytest.mark.full
def test_the_memory_of_the_page_is_current(tmp_path, capsys):
    assert main(["--write-docs", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()


@pytest.mark.parametrize("ranks", [3, 8, 9, 24, 64])
def test_every_rank_has_a_colour_of_its_own_which_the_legend_names(ranks):
    root = ElementTree.fromstring(svg_of(ranks))
    colours = {shape.find("{*}title").text: shape.get("fill") for shape in root.findall("{*}polygon")}
    assert len(set(colours.values())) == len(colours) == ranks
    squares = {
        (float(box.get("x")), float(box.get("y"))): box.get("fill") for box in root.findall("{*}rect[@height='14']")
    }
    notes = {(float(text.get("x")) - 20, float(text.get("y")) - 12): text.text for text in root.findall("{*}text")}
    assert {notes[place]: fill for place, fill in squares.items()} == colours
    inside = [float(text.get("x")) < float(root.get("width")) for text in root.findall("{*}text")]
    assert all(inside)
