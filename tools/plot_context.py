"""Draw context parallelism: which rank holds which chunk of a sample, and what the ring computes and sends. Needs no torch.

    python tools/plot_context.py --context-parallel-size 4
    python tools/plot_context.py --context-parallel-size 8 --svg plots/ring.svg

The chunks and the blocks come from the functions that training uses. --write-docs docs/context_parallel.md regenerates that
page with its picture, and needs torch for its table of memory.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import FlagConfig, option
from tools.drawing.files import kind_problems, write_drawing
from tools.drawing.page import PICTURE, RANKS_DRAWN, page
from tools.drawing.ring import svg_of, text_of_chunks, text_of_ring, text_of_scores
from tools.errors import run_tool


@dataclass(frozen=True)
class PlotContextConfig(FlagConfig):
    """Ring to draw."""

    context_parallel_size: int = option(4, "context-parallel ranks, which shard each sample")
    svg: str | None = option(None, "picture to write, as its ending says: .svg or .png", metavar="FILE")
    text: bool = option(False, "print the drawing even with --svg")
    write_docs: str | None = option(
        None, "write the documentation page on context parallelism to this file, and nothing else", metavar="FILE"
    )

    def problems(self) -> Iterator[str]:
        if self.context_parallel_size < 1:
            yield f"--context-parallel-size ({self.context_parallel_size}) must be at least 1; raise it"
        yield from kind_problems("svg", self.svg)


def run(config: PlotContextConfig) -> None:
    """Print and write what the flags ask for."""
    ranks = config.context_parallel_size
    if config.write_docs:
        file = Path(config.write_docs)
        file.write_text(page())
        file.with_name(PICTURE).write_text(svg_of(RANKS_DRAWN))
        print(f"wrote {file} and {file.with_name(PICTURE)}")
        return
    if config.text or not config.svg:
        print("\n".join([*text_of_chunks(ranks), "", *text_of_ring(ranks), "", *text_of_scores(ranks)]))
    if config.svg:
        write_drawing("--svg", config.svg, svg_of(ranks))
        print(f"wrote {config.svg}")


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [PlotContextConfig], run, arguments)


if __name__ == "__main__":
    sys.exit(main())
