"""The chunks and the ring of context parallelism as text and as SVG, by the functions that training uses. Needs no torch."""

from megatron.core.context_parallel.causal_blocks import blocks_between
from megatron.core.parallel.sequence_shard import chunks_of

_COLOURS = ("#86aed6", "#7fbf7b", "#edc948", "#e58b88", "#b39bc8", "#76b7b2", "#f2a65a", "#b5b5b5")  # of ranks, in turn
_CELL = 16  # SVG units of a pair of chunks


def owner_of_keys(rank: int, step: int, ranks: int) -> int:
    """The rank whose keys and values a rank has in a step of the ring."""
    return (rank - step) % ranks


def pairs_in(rank: int, step: int, ranks: int) -> dict[tuple[int, int], bool]:
    """(chunk of queries, chunk of keys) that a rank computes in a step -> whether it is a diagonal, of which half is computed."""
    mine, theirs = chunks_of(rank, ranks), chunks_of(owner_of_keys(rank, step, ranks), ranks)
    found: dict[tuple[int, int], bool] = {}
    for block in blocks_between(mine, theirs, 1):
        for row in mine[block.rows]:
            for key in theirs[block.keys]:
                if not block.causal or key <= row:
                    found[row, key] = block.causal and key == row
    return found


def text_of_chunks(ranks: int) -> list[str]:
    """Which rank holds which chunk."""
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    width = len(str(chunks[-1]))
    rows = [("chunk", [str(chunk) for chunk in chunks])]
    rows += [(f"rank {r}", [str(c) if c in chunks_of(r, ranks) else "." for c in chunks]) for r in range(ranks)]
    return [f"{name:<8}{' '.join(cell.rjust(width) for cell in cells)}" for name, cells in rows]


def text_of_ring(ranks: int) -> list[str]:
    """One row for each rank, one column for each step: the chunks of queries x those of keys, and what is sent meanwhile."""
    rows = [["", *(f"step {step}" for step in range(ranks))]]
    for rank in range(ranks):
        rows.append([f"rank {rank}", *(_work(rank, step, ranks) for step in range(ranks))])
        sent = [f"  keys of {owner_of_keys(rank, step, ranks)} -> {(rank + 1) % ranks}" for step in range(ranks - 1)]
        rows.append(["", *sent, "  sends nothing"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _work(rank: int, step: int, ranks: int) -> str:
    rows_of: dict[tuple[int, ...], list[str]] = {}  # keys -> the chunks of queries that see them
    pairs = pairs_in(rank, step, ranks)
    for row in sorted({row for row, _ in pairs}):
        seen = tuple(key for key in sorted(key for r, key in pairs if r == row))
        rows_of.setdefault(seen, []).append(str(row))
    diagonal = {key for (_, key), half in pairs.items() if half}
    return ", ".join(
        f"{' '.join(rows)} x {' '.join(f'{key}/' if str(key) in rows and key in diagonal else str(key) for key in keys)}"
        for keys, rows in rows_of.items()
    )


def text_of_scores(ranks: int) -> list[str]:
    """All pairs of chunks: the step in which a pair is computed, / behind a diagonal, . for a pair that is skipped."""
    steps = {
        pair: f"{step}{'/' if half else ' '}"
        for rank in range(ranks)
        for step in range(ranks)
        for pair, half in pairs_in(rank, step, ranks).items()
    }
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    width = 1 + len(str(chunks[-1]))
    lines = [f"{'keys of chunk':<24}" + " ".join(f"{chunk} ".rjust(width) for chunk in chunks).rstrip()]
    for rank in range(ranks):
        for row in chunks_of(rank, ranks):
            cells = " ".join(steps.get((row, key), ". ").rjust(width) for key in chunks)
            lines.append(f"rank {rank}, queries of {row}".ljust(24) + cells.rstrip())
    return lines


def svg_of(ranks: int) -> str:
    """A square of all pairs of chunks for each step. A pair has the colour of its rank, and a diagonal is a triangle."""
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    side, columns = _CELL * len(chunks), min(ranks, 4)
    width, height = 30 + columns * (side + 30), 60 + -(-ranks // columns) * (side + 50)
    width = max(width, 420)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="30" y="22" font-size="15">ring of {ranks}: queries down, keys across</text>',
    ]
    for step in range(ranks):
        left, top = 30 + step % columns * (side + 30), 60 + step // columns * (side + 50)
        lines.append(f'<text x="{left}" y="{top - 6}">step {step}</text>')
        lines.append(f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="#eee"/>')
        for rank in range(ranks):
            for (row, key), half in pairs_in(rank, step, ranks).items():
                lines.append(_cell(left + _CELL * key, top + _CELL * row, rank, half))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cell(x: int, y: int, rank: int, half: bool) -> str:
    corners = [(x, y), (x, y + _CELL), (x + _CELL, y + _CELL)] + ([] if half else [(x + _CELL, y)])
    points = " ".join(f"{a},{b}" for a, b in corners)
    colour = _COLOURS[rank % len(_COLOURS)]
    return f'<polygon points="{points}" fill="{colour}" stroke="white"><title>rank {rank}</title></polygon>'
