"""Measure what a sliding window saves: attention forward and backward, with windows of several widths and without one.

    python benchmarks/window_attention.py                                1 x 8 heads of 64, 8,192 tokens, float32
    python benchmarks/window_attention.py --windows 1024 --half --rounds 15

All widths take turns in one process, through the kernel that --attention-backend fused takes. Prints milliseconds (medians, least and
largest), by the clock and of the processor, and ratios of medians with the least and the largest ratio of a round. Exit code 1 if the
second width does not take 2.5 to 4.5 times the first, or the first more than 0.3 of attention without a window, where the widths are
those of the default.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.ops.attention.document_and_window_masks import with_window
from megatron.core.ops.attention.kernels import AttentionCase, kernel_or_fallback
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys

DEFAULT = [512, 2048]


def seconds(heads: list[torch.Tensor], grad: torch.Tensor, before: int | None) -> tuple[float, float]:
    """Return the seconds of a forward and a backward, by the clock and of the processor.

    heads: q, k, v [b, n, s, d]. before: keys of the window before a query; None: no window.
    """
    for x in heads:
        x.grad = None
    mask = with_window(None, before, heads[1].shape[2])
    dropout = AttentionDropout(0.0, SampleDropoutKeys(0), 0, 0)
    start = time.perf_counter()
    cpu_start = time.process_time()
    kernel = kernel_or_fallback("fused", AttentionCase(*heads[:2], mask, 0.0))
    kernel.compute(*heads, mask, dropout).backward(grad)
    return time.perf_counter() - start, time.process_time() - cpu_start


def ratio_of_medians(numbers: list[float], base: list[float]) -> str:
    """Return the ratio of medians, with the range of the ratios of rounds."""
    ratios = [a / b for a, b in zip(numbers, base)]
    return f"{statistics.median(numbers) / statistics.median(base):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=DEFAULT, help="keys of a query, its own among them")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens")
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--groups", type=int, help="key/value heads; default: one for each query head")
    parser.add_argument("--width", type=int, default=64, help="numbers of a head")
    parser.add_argument("--half", action="store_true", help="bfloat16 instead of float32")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns")
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.half else torch.float32
    counts = [options.heads, *[options.groups or options.heads] * 2, options.heads]
    *heads, grad = (torch.randn(1, options.sequence, n, options.width, dtype=dtype).transpose(1, 2) for n in counts)
    heads = [x.requires_grad_() for x in heads]
    contenders = {f"{w} keys": w - 1 for w in options.windows} | {"no window": None}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        names = list(contenders) if turn % 2 else list(reversed(contenders))
        for name in names:
            took[name].append(seconds(heads, grad, contenders[name]))
    clock = {name: [by_clock for by_clock, _ in turns[1:]] for name, turns in took.items()}  # without the warm-up turn
    processor = {name: [by_processor for _, by_processor in turns[1:]] for name, turns in took.items()}
    first = next(iter(contenders))
    full = "no window"
    print(f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, {options.rounds} rounds")
    for name, own in clock.items():
        print(
            f"{name:>10}  {1e3 * statistics.median(own):8.0f} ms ({1e3 * min(own):.0f}-{1e3 * max(own):.0f})"
            f"  processor {1e3 * statistics.median(processor[name]):8.0f} ms  of no window {ratio_of_medians(own, clock[full])}"
            f"  of {first} {ratio_of_medians(own, clock[first])}"
            f"  by processor {ratio_of_medians(processor[name], processor[full])}"
        )
    if options.windows != DEFAULT:
        return 0
    medians = {name: statistics.median(own) for name, own in processor.items()}
    wide_to_narrow = medians["2048 keys"] / medians["512 keys"]
    narrow_to_full = medians["512 keys"] / medians[full]
    return 0 if 2.5 <= wide_to_narrow <= 4.5 and narrow_to_full <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
