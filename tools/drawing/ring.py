"""Draw the chunks and the ring of context parallelism as text and SVG, by training's functions. Needs no torch."""

import colorsys
from collections.abc import Iterator

from megatron.core.context_parallel.causal_blocks import blocks_between
from megatron.core.parallel.zigzag_sequence_row_ranges import chunks_of

_COLOURS = ("#86aed6", "#7fbf7b", "#edc948", "#e58b88", "#b39bc8", "#76b7b2", "#f2a65a", "#b5b5b5")  # of up to 8 ranks
_CELL = 16  # SVG units of a pair of chunks


def owner_of_keys(rank: int, step: int, ranks: int) -> int:
    """Return the rank whose keys and values a rank has in a step of the ring."""
    return (rank - step) % ranks


def pairs_in(rank: int, step: int, ranks: int) -> dict[tuple[int, int], bool]:
    """Return the pairs (chunk of queries, chunk of keys) that a rank computes in a step of the ring.

    The value is True for a diagonal pair, of which half is computed.
    """
    query_chunks = chunks_of(rank, ranks)
    key_chunks = chunks_of(owner_of_keys(rank, step, ranks), ranks)
    pairs: dict[tuple[int, int], bool] = {}
    for block in blocks_between(query_chunks, key_chunks, 1):
        for row in query_chunks[block.rows]:
            for key in key_chunks[block.keys]:
                if not block.causal or key <= row:
                    pairs[row, key] = block.causal and key == row
    return pairs


def text_of_chunks(ranks: int) -> list[str]:
    """Draw which rank has which chunk: a row for each rank."""
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    width = len(str(chunks[-1]))
    rows = [("chunk", [str(chunk) for chunk in chunks])]
    for rank in range(ranks):
        rank_chunks = chunks_of(rank, ranks)
        rows.append((f"rank {rank}", [str(chunk) if chunk in rank_chunks else "." for chunk in chunks]))
    return [f"{name:<8}{' '.join(cell.rjust(width) for cell in cells)}" for name, cells in rows]


def text_of_ring(ranks: int) -> list[str]:
    """Draw the ring, a row for each rank and a column for each step: chunks of queries x keys, and what is sent."""
    rows = [["", *(f"step {step}" for step in range(ranks))]]
    for rank in range(ranks):
        rows.append([f"rank {rank}", *(_work(rank, step, ranks) for step in range(ranks))])
        sent = [f"  keys of {owner_of_keys(rank, step, ranks)} -> {(rank + 1) % ranks}" for step in range(ranks - 1)]
        rows.append(["", *sent, "  sends nothing"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _work(rank: int, step: int, ranks: int) -> str:
    """Return what a rank computes in a step, as `0 x 0/, 3 x 0 3/`."""
    pairs = pairs_in(rank, step, ranks)

    # query chunks that see the same key chunks are written together
    rows_of_keys: dict[tuple[int, ...], list[int]] = {}
    for row in sorted({row for row, _ in pairs}):
        keys = tuple(sorted(key for pair_row, key in pairs if pair_row == row))
        rows_of_keys.setdefault(keys, []).append(row)

    products = []
    for keys, rows in rows_of_keys.items():
        key_texts = [f"{key}/" if pairs.get((key, key), False) and key in rows else str(key) for key in keys]
        products.append(f"{' '.join(map(str, rows))} x {' '.join(key_texts)}")
    return ", ".join(products)


def text_of_scores(ranks: int) -> list[str]:
    """Draw all pairs of chunks: the step in which a pair is computed, with / on a diagonal; . if it is skipped."""
    steps = {}
    for rank in range(ranks):
        for step in range(ranks):
            for pair, is_diagonal in pairs_in(rank, step, ranks).items():
                steps[pair] = f"{step}/" if is_diagonal else f"{step} "
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    width = 1 + len(str(chunks[-1]))
    lines = [f"{'keys of chunk':<24}" + " ".join(f"{chunk} ".rjust(width) for chunk in chunks).rstrip()]
    for rank in range(ranks):
        for row in chunks_of(rank, ranks):
            cells = " ".join(steps.get((row, key), ". ").rjust(width) for key in chunks)
            lines.append(f"rank {rank}, queries of {row}".ljust(24) + cells.rstrip())
    return lines


def colour_of(rank: int, ranks: int) -> str:
    """Return a rank's colour. More than 8 ranks have hues all round the circle, neighbours in three lightnesses."""
    if ranks <= len(_COLOURS):
        return _COLOURS[rank]
    red, green, blue = colorsys.hls_to_rgb(rank / ranks, (0.7, 0.84, 0.6)[rank % 3], 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def svg_of(ranks: int) -> str:
    """Draw all pairs of chunks as a square for each step. The colour and the number are the rank; a triangle is a diagonal."""
    chunks = sorted(chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks))
    side = _CELL * len(chunks)
    columns = min(ranks, 4)
    gap = 60  # between squares: the numbers of the chunks, and a title
    width = max(430, 40 + columns * (side + gap))
    squares_end = 40 + -(-ranks // columns) * (side + gap + 20)
    notes_per_row = max(1, (width - 60) // 90)
    legend_end = squares_end + 20 * -(-ranks // notes_per_row)
    height = legend_end + 36
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="30" y="22" font-size="15">ring of {ranks}: which rank computes which chunks, and when</text>',
    ]

    # the squares with their axes
    for step in range(ranks):
        left = 60 + step % columns * (side + gap)
        top = 60 + step // columns * (side + gap + 20)
        lines.append(f'<text x="{left}" y="{top - 6}">step {step}</text>')
        lines.append(f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="#eee"/>')
        for rank in range(ranks):
            for (row, key), is_diagonal in pairs_in(rank, step, ranks).items():
                lines += _cell(left + _CELL * key, top + _CELL * row, rank, ranks, is_diagonal)
        for chunk in chunks:
            middle = _CELL * chunk + _CELL // 2
            lines.append(f'<text x="{left - 5}" y="{top + middle + 3}" text-anchor="end" font-size="9">{chunk}</text>')
            lines.append(
                f'<text x="{left + middle}" y="{top + side + 11}" text-anchor="middle" font-size="9">{chunk}</text>'
            )
        lines.append(f'<text x="{left}" y="{top + side + 26}">across: chunk of keys;</text>')
        lines.append(f'<text x="{left}" y="{top + side + 40}">down: chunk of queries</text>')

    # the legend
    for rank in range(ranks):
        x = 30 + rank % notes_per_row * 90
        y = squares_end + 20 * (rank // notes_per_row)
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour_of(rank, ranks)}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}">rank {rank}</text>')
    lines.append(
        f'<text x="30" y="{legend_end + 16}">triangle: the half that a causal mask shows; grey: in another step, or never</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cell(x: int, y: int, rank: int, ranks: int, is_triangle: bool) -> Iterator[str]:
    """Yield the SVG of a pair of chunks, with its corner at (x, y): its shape, and the rank's number."""
    corners = [(x, y), (x, y + _CELL), (x + _CELL, y + _CELL)]
    if not is_triangle:
        corners.append((x + _CELL, y))
    points = " ".join(f"{a},{b}" for a, b in corners)
    yield f'<polygon points="{points}" fill="{colour_of(rank, ranks)}" stroke="white"><title>rank {rank}</title></polygon>'
    middle = x + (5 if is_triangle else 8)
    yield f'<text x="{middle}" y="{y + (14 if is_triangle else 11)}" text-anchor="middle" font-size="8">{rank}</text>'
