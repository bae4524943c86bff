"""Which rows of a sample a rank holds, and which blocks of attention's scores it computes."""

from itertools import product

import pytest
from said import tells

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.context_parallel.causal_blocks import blocks_between, tiles_between
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.parallel.rank_grid import Axis
from megatron.core.parallel.zigzag_sequence_row_ranges import SequenceShard, chunks_of
from megatron.core.transformer.context_parallel_setting_problems import context_parallel_problems
from megatron.core.transformer.model_config import ModelConfig

SHAPES = list(product((1, 2, 3, 4, 8), (1, 3)))  # context-parallel ranks, rows of a chunk


def axis(name: str, size: int, rank: int) -> Axis:
    return Axis(name, tuple(range(size)), rank)


def rows_of(chunks: tuple[int, ...], size: int) -> list[int]:
    return [chunk * size + row for chunk in chunks for row in range(size)]


@pytest.mark.parametrize(("ranks", "size"), SHAPES)
def test_ranks_hold_each_row_once(ranks: int, size: int):
    length = size * ranks * (1 if ranks == 1 else 2)
    for divided in {1, 2 if length // ranks % 2 == 0 else 1}:
        seen = []
        for rank, part in product(range(ranks), range(divided)):
            rows = SequenceShard(axis("cp", ranks, rank), axis("tp", divided, part))
            held = rows.local_length(length)
            mine = [row for start, stop in rows.ranges(held) for row in range(start, stop)]
            inside = rows_of(rows.chunks, length // ranks // len(rows.chunks))
            assert mine == inside[part * held : (part + 1) * held]
            assert rows.global_length(held) == length and rows.within_layers.ranges(held * divided)[0][0] == inside[0]
            seen += mine
        assert sorted(seen) == list(range(length))


@pytest.mark.parametrize(("ranks", "size"), SHAPES)
def test_blocks_hold_each_visible_pair_once_and_the_same_work_on_every_rank(ranks: int, size: int):
    everything = tuple(range(1 if ranks == 1 else 2 * ranks))
    length = size * len(everything)
    for rank in range(ranks):
        mine = chunks_of(rank, ranks)
        rows = rows_of(mine, size)
        visible = sorted((row, key) for row in rows for key in range(row + 1))
        for sources in ([chunks_of(j, ranks) for j in range(ranks)], [everything]):
            assert sorted(_pairs(mine, sources, size)) == visible
            tiled = _tiled_pairs(mine, sources, size, before=None)
            assert sorted(pair for pair in tiled if pair[1] <= pair[0]) == visible
            near = sorted(pair for pair in visible if pair[1] >= pair[0] - 2)
            assert sorted(p for p in _tiled_pairs(mine, sources, size, before=2) if p[0] - 2 <= p[1] <= p[0]) == near
        assert len(visible) * ranks * 2 == length * (length + 1)


def _pairs(mine: tuple[int, ...], sources: list[tuple[int, ...]], size: int) -> list[tuple[int, int]]:
    rows, found = rows_of(mine, size), []
    for theirs in sources:
        keys = rows_of(theirs, size)
        for block in blocks_between(mine, theirs, size):
            inside = [(a, b) for a, b in product(enumerate(rows[block.rows]), enumerate(keys[block.keys]))]
            found += [(a[1], b[1]) for a, b in inside if not block.causal or b[0] <= a[0]]
    return found


def _tiled_pairs(mine: tuple, sources: list[tuple], size: int, before: int | None) -> list[tuple[int, int]]:
    rows, found = rows_of(mine, size), []
    for theirs in sources:
        keys = rows_of(theirs, size)
        for tile in tiles_between(mine, theirs, size, queries=2, keys=2, window_left=before):
            assert rows[tile.rows][0] == tile.first_row and keys[tile.keys][0] == tile.first_key
            found += product(rows[tile.rows], keys[tile.keys])
    return found


def test_the_ring_computes_one_block_a_step():
    for rank, step in product(range(4), range(4)):
        (block,) = blocks_between(chunks_of(rank, 4), chunks_of((rank - step) % 4, 4), 5)
        scores = (block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start)
        assert (scores, block.causal) == ((100, True) if step == 0 else (50, False))


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="a sequence has 30 tokens; it must have a multiple of 4"):
        SequenceShard(axis("cp", 2, 0)).local_length(30)
    with pytest.raises(ConfigError, match="and 6 of 4; change --seq-length"):
        SequenceShard(axis("cp", 2, 0), axis("tp", 4, 0)).local_length(12)


def test_rows_that_sequence_parallelism_cannot_divide_are_refused():
    sizes = ParallelConfig(context_parallel_size=2, tensor_model_parallel_size=4, sequence_parallel=True)
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    (problem,) = context_parallel_problems(sizes, model, {"--seq-length": 36})
    assert tells(problem, "--sequence-parallel 18 --tensor-model-parallel-size 4 --seq-length 36")
    assert not [*context_parallel_problems(sizes, model, {"--seq-length": 32, "--decoder-seq-length": None})]
