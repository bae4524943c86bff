"""Statistics of dropout masks: standard scores of what fair, independent bits would give.

    python tests/campaigns/mask_statistics.py --bits 32          2^32 bits at each of two probabilities, printed as the table of docs/dropout.md

Each test asks an idea of a published battery of bits (1: dropped) whose keys, rows and columns have structure:

    frequency   of bits, as a whole, of each row and each column           Knuth 3.3.2 A; NIST SP 800-22, 2.1
    masks       every two masks, of keys that are neighbours               serial test, Knuth 3.3.2 B
    key bits    two masks whose key differs in one bit                     strict avalanche, Webster and Tavares 1985
    rows        every two rows of a mask                                   serial test
    columns     every two columns, over all masks                          serial test
    squares     parities of bits in 2 rows and 2 columns, which would show a sum of their words
    runs        of equal bits, along rows and columns                      Knuth 3.3.2 G; NIST 2.3
    patterns    of 8 bits at lags 1, 2, 4, ... along rows and columns      poker test, Knuth 3.3.2 D; NIST 2.11
    spectrum    peaks of the two-dimensional Fourier transform             NIST 2.6
    ranks       of binary matrices of 32 x 32 bits                         Marsaglia 1985, DIEHARD; NIST 2.5

(Knuth: The Art of Computer Programming, volume 2. NIST 2.x: section 2.x of SP 800-22.)
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "campaigns"))

from megatron.core.ops.dropout_masks import MaskWords, column_words, keep_mask, numbered_keys, pairs_of_words
from megatron.core.ops.layout_invariant_dropout import AttentionDropout, SampleDropoutKeys

CPU = torch.device("cpu")
LAGS = (1, 2, 3, 4, 8, 16, 32, 64)


def masks(p: float, number: int, size: int = 512) -> Tensor:
    """Dropped bits [16, size, size] of two neighbouring seeds, layers, samples and heads each."""
    found = []
    for seed, layer in product((1234, 1235), (number, number + 1)):
        keys = SampleDropoutKeys(seed)
        keys.samples = 2 * number, 2 * number + 1
        words = AttentionDropout(p, keys, layer, first_head=1).words_for((2, 2, size, size), CPU)
        found.append(~keep_mask(words, p).flatten(0, 1))
    return torch.cat(found)


def scores(bits: Tensor, p: float) -> dict[str, Tensor]:
    """By test, scores of mean 0 and variance 1, near to normal, of a lot of masks [masks, size, size]."""
    x = _standard(bits, p)
    return {
        "frequency": torch.cat(
            [_scores_of_sums(x.sum(over), math.prod(x.shape[i] for i in over)) for over in ((0, 1, 2), (0, 2), (0, 1))]
        ),
        "masks": every_two(x.flatten(1)),
        "rows": every_two(x.transpose(0, 1).flatten(1)),
        "columns": every_two(x.flatten(0, 1).T),
        "runs": torch.cat([neighbours(x, lag, dim) for lag in LAGS for dim in (1, 2)]),
        "patterns": torch.cat(
            [patterns(bits.movedim(dim, 0), p, lag) for lag in LAGS for dim in (1, 2) if bits.shape[1] % (8 * lag) == 0]
        ),
        "spectrum": spectrum(x),
        **({"squares": squares(x), "ranks": ranks(bits)} if p == 0.5 else {}),
    }


def _scores_of_sums(sums: Tensor, draws: int) -> Tensor:
    """Of sums of `draws` independent numbers of mean 0 and variance 1."""
    return sums.double().flatten() / math.sqrt(draws)


def _scores_of_chi_squares(values: Tensor, freedom: int) -> Tensor:
    """Wilson and Hilferty 1931."""
    spread = 2 / (9 * freedom)
    return ((values.double().flatten() / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def every_two(x: Tensor) -> Tensor:
    """Correlations of every two rows of x."""
    products = x @ x.T
    return _scores_of_sums(products[torch.ones_like(products, dtype=torch.bool).triu(1)], x.shape[1])


def squares(x: Tensor) -> Tensor:
    """Correlations of every two columns of the parities of rows at some distances."""
    lags = [lag for lag in (1, 2, 64) if 2 * lag < x.shape[1]]
    return torch.cat([every_two((x[:, lag:] * x[:, :-lag]).flatten(0, 1).T) for lag in lags])


def neighbours(x: Tensor, lag: int, dim: int) -> Tensor:
    count = x.shape[dim] - lag
    return _scores_of_sums(
        (x.narrow(dim, lag, count) * x.narrow(dim, 0, count)).sum(), x.numel() // x.shape[dim] * count
    )


def patterns(bits: Tensor, p: float, lag: int) -> Tensor:
    """Bytes of 8 bits along the first dimension, `lag` apart, against the shares that their numbers of ones give them."""
    lanes = bits.reshape(bits.shape[0] // (8 * lag), 8, -1)
    counts = torch.bincount(sum(lanes[:, i].to(torch.int64) << i for i in range(8)).flatten(), minlength=256).double()
    ones = torch.tensor([byte.bit_count() for byte in range(256)])
    expected = p**ones * (1 - p) ** (8 - ones) * lanes.shape[0] * lanes.shape[2]
    often = expected >= 10  # the others count as one pattern
    seen, due = (torch.cat([values[often], values[~often].sum()[None]]) for values in (counts, expected.double()))
    at_all = due > 5
    return _scores_of_chi_squares(((seen - due) ** 2 / due)[at_all].sum(), int(at_all.sum()) - 1)


def spectrum(x: Tensor) -> Tensor:
    """Power of every frequency but those whose transform is real, over a lot: chi-square."""
    power = torch.fft.rfft2(x).abs().square()[:, 1:, 1 : x.shape[2] // 2] / (x.shape[1] * x.shape[2])
    return _scores_of_chi_squares(2 * power.sum(0), 2 * len(x))


def ranks(bits: Tensor) -> Tensor:
    """Shares of 32 x 32 matrices over GF(2) of rank 32, 31 and less: 0.2888, 0.5776, 0.1336."""
    count = bits.shape[1] // 32
    tiles = bits.view(-1, count, 32, count, 32).transpose(2, 3).reshape(-1, 32, 32)
    rows = (tiles.to(torch.int64) << torch.arange(32)).sum(-1)  # [tiles, 32], a row in an integer
    rank = torch.zeros(len(rows), dtype=torch.int64)
    for column in range(32):
        has = (rows >> column) & 1
        pivot = has.argmax(1, keepdim=True)
        found = has.gather(1, pivot)
        of_pivot = rows.gather(1, pivot)
        rows = torch.where((has == 1) & (found == 1), rows ^ of_pivot, rows)  # the pivot becomes zero
        rank += found[:, 0]
    seen = torch.stack([(rank == 32).sum(), (rank == 31).sum(), (rank < 31).sum()]).double()
    full = math.prod(1 - 2.0**-i for i in range(1, 33))
    one_less = math.prod(1 - 2.0**-i for i in range(2, 33)) ** 2 / math.prod(1 - 2.0**-i for i in range(1, 32)) / 2
    due = torch.tensor([full, one_less, 1 - full - one_less], dtype=torch.float64) * len(rank)
    return _scores_of_chi_squares(((seen - due) ** 2 / due).sum(), 2)


def key_bits(p: float, rows: int, width: int, seed: int) -> Tensor:
    """Correlations of masks of two heads whose keys differ in one of 64 bits."""
    draw = torch.Generator().manual_seed(seed)
    key, place = (torch.randint(-(2**31), 2**31, (2,), generator=draw).int() for _ in range(2))
    keys = torch.stack([key, *(key ^ one for one in pairs_of_words([1 << bit for bit in range(64)]))])
    words = MaskWords(numbered_keys(keys, 0, rows), column_words(width, place))
    first, *others = (_standard(~keep_mask(words._replace(lines=lines), p), p) for lines in words.lines)
    return _scores_of_sums(torch.stack([(first * other).sum() for other in others]), rows * width)


def _standard(bits: Tensor, p: float) -> Tensor:
    """As numbers of mean 0 and variance 1."""
    return (bits.float() - p) / math.sqrt(p * (1 - p))


# ---------------------------------------------------------------- the campaign


def lot(p: float, number: int, size: int = 512) -> dict[str, Tensor]:
    """All scores of 16 masks."""
    return {**scores(masks(p, number, size), p), "key bits": key_bits(p, size // 4, size, number)}


def added(lots: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The scores of all lots together, which have mean 0 and variance 1 again."""
    count, total = Counter(), {}
    for one in lots:
        for name, values in one.items():
            count[name] += 1
            total[name] = total.get(name, 0) + values
    return {name: values / math.sqrt(count[name]) for name, values in total.items()}


def chance(values: Tensor) -> float:
    """How often the largest of so many fair scores is as large."""
    return -math.expm1(len(values) * math.log1p(-math.erfc(float(values.abs().max()) / math.sqrt(2))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bits", type=int, default=28, help="bits of each probability, as a power of two")
    given = parser.parse_args()
    print("| p | test | scores | largest | as large by chance |\n|---|---|---|---|---|")
    for p in (0.5, 0.1):
        for name, values in added(lot(p, number) for number in range(2 ** (given.bits - 22))).items():
            print(f"| {p} | {name} | {len(values):,} | {values.abs().max():.2f} | {chance(values):.2f} |", flush=True)


if __name__ == "__main__":
    main()
