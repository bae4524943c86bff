"""The space of layouts and models whose numbers must be the same, and small sets that cover it. Pure: integers and names.

A case gives each dimension one of its choices. The product is far too large to run before a commit, so the tests run a covering
set: every pair (fast set) or every triple (full set) of choices of different dimensions that can stand together occurs at least
once. `tests/campaigns/parity_sweep.py` runs the product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations, product
from math import prod
from random import Random

import numpy as np
from covering import Combined

# What a layout is made of. They constrain one another, so that these are listed together ...
LAYOUT = {
    "tp": (1, 2, 4),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "v": (1, 2, 4),
    "dp": (1, 2, 4),
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-interleaved", "zb-v"),
    "microbatches": ("fewer", "equal", "more"),  # than pipeline ranks
    "scatter": (True, False),  # equal copies of what passes between stages are sent in parts
}
CHUNKS = {"interleaved": (1, 2, 4), "zb-interleaved": (2, 4), "zb-v": (2,)}  # per rank, where not one
IN_GROUPS = ("interleaved", "zb-interleaved")  # schedules that take multiples of the pipeline ranks as microbatches
# ... and these go with any of them.
FREE = {
    "corner": ("plain", "5 words", "two groups", "one group", "smoothing", "head norms", "masks", "windows"),
    "recompute": ("none", "selective", "uniform 2", "block 1"),
    "style": ("gpt2", "llama"),
    "tied": (True, False),
    "dropout": (0.0, 0.1),
    "overlap": (False, True),
    "delayed": (False, True),  # calls complete at their wait, and poison their result until then
}
DIMENSIONS = {**LAYOUT, **FREE}
COVERED_RANKS = 16  # the largest job in a covering set; the sweep goes to 64
NOT_COVERED = (
    "zb-interleaved",
)  # interleaved with the split backwards of zb-h1: test_zero_bubble.py has some, the sweep all
IN_PAIRS = (("schedule", "zb-v"), ("corner", "windows"))  # the triples with these choices are the sweep's
_MICROBATCHES = {
    (1, "equal"): 1,
    (1, "more"): 2,
    (2, "fewer"): 1,
    (2, "equal"): 2,
    (2, "more"): 3,
    (4, "fewer"): 3,
    (4, "equal"): 4,
    (4, "more"): 6,
}
_CANDIDATES = 48  # completions looked at for each case of a covering set


@dataclass(frozen=True)
class Case(Combined):
    """One choice of each dimension, in the order of DIMENSIONS."""

    tp: int
    sp: bool
    pp: int
    v: int
    dp: int
    schedule: str
    microbatches: str
    scatter: bool
    corner: str
    recompute: str
    style: str
    tied: bool
    dropout: float
    overlap: bool
    delayed: bool

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layers(self) -> int:
        """Four, or one in every stage where there are more stages."""
        return max(4, self.pp * self.v)

    @property
    def m(self) -> int:
        if self.schedule in IN_GROUPS and self.microbatches == "more":
            return 2 * self.pp  # it takes multiples only
        return _MICROBATCHES[self.pp, self.microbatches]

    @property
    def global_batch(self) -> int:
        return next(samples for samples in (12, 24, 32) if samples % (self.dp * self.m) == 0)

    @property
    def cost(self) -> int:
        """Forwards of a layer in one step, over all ranks."""
        return self.tp * self.dp * self.m * self.layers

    def __str__(self) -> str:
        parts = [f"tp{self.tp}{'sp' if self.sp else ''}-pp{self.pp}-dp{self.dp}-m{self.m}", self.schedule]
        parts += [f"v{self.v}"] * (self.v > 1) + ["whole"] * (not self.scatter)
        parts += [self.recompute.replace(" ", "")] * (self.recompute != "none")
        parts += [self.style, "tied" if self.tied else "untied"] + ["dropout"] * (self.dropout > 0)
        parts += [self.corner.replace(" ", "")] * (self.corner != "plain")
        return "-".join([*parts, *["overlap"] * self.overlap, *["delayed"] * self.delayed])


def can_be(layout: dict) -> bool:
    """Whether the choices of LAYOUT can stand together, and differ from others that can."""
    tp, pp, v, schedule = layout["tp"], layout["pp"], layout["v"], layout["schedule"]
    return (
        (tp > 1 or not layout["sp"])
        and v in CHUNKS.get(schedule, (1,))
        and (pp > 1 or schedule not in CHUNKS)
        and not (layout["microbatches"] == "fewer" and (pp == 1 or schedule in IN_GROUPS))
        and (layout["scatter"] or (tp > 1 and pp > 1 and not layout["sp"]))
    )


@cache
def layouts(max_ranks: int, left_out: tuple[str, ...] = ()) -> tuple[tuple, ...]:
    """The choices of LAYOUT that can stand together, small jobs first. left_out: schedules."""
    named = (dict(zip(LAYOUT, values)) for values in product(*LAYOUT.values()))
    named = (x for x in named if x["schedule"] not in left_out)
    kept = [x for x in named if can_be(x) and x["tp"] * x["pp"] * x["dp"] <= max_ranks]
    return tuple(tuple(x.values()) for x in sorted(kept, key=lambda x: x["tp"] * x["pp"] * x["dp"]))


def all_cases(max_ranks: int = 64) -> Iterator[Case]:
    """The whole product, small jobs first."""
    return map(case_of, range(count_cases(max_ranks)))


def count_cases(max_ranks: int = 64) -> int:
    return len(layouts(max_ranks)) * prod(map(len, FREE.values()))


def case_of(number: int) -> Case:
    """Case `number` of the product; a smaller limit of ranks is a beginning of it."""
    free = []
    for choices in reversed(FREE.values()):
        number, choice = divmod(number, len(choices))
        free.append(choices[choice])
    return Case(*layouts(64)[number], *reversed(free))


# ---------------------------------------------------------------- the product of what most runs choose

_CHOSEN = tuple(name for name in LAYOUT if name != "scatter")
_RECOMPUTE = ("none", "selective", "full")


@cache
def main_product() -> tuple[Case, ...]:
    """One case for every combination of tp, sp, pp, v, dp, schedule and microbatches that can stand together, with every choice
    of recompute {none, selective, full}, style, tied and dropout. What is left (corner, method of full recompute, scatter, overlap,
    delayed) is dealt out, evenly and by the case's number."""
    possible: dict[tuple, list[bool]] = {}
    for layout in (dict(zip(LAYOUT, values)) for values in layouts(64)):
        possible.setdefault(tuple(layout[name] for name in _CHOSEN), []).append(layout["scatter"])
    cases = []
    for chosen, recompute, style, tied, dropout in product(
        possible, _RECOMPUTE, FREE["style"], FREE["tied"], FREE["dropout"]
    ):
        deal = Random(len(cases))
        method = deal.choice(("uniform 2", "block 1"))
        cases.append(
            Case(
                **dict(zip(_CHOSEN, chosen)),
                style=style,
                tied=tied,
                dropout=dropout,
                recompute=method if recompute == "full" else recompute,
                scatter=deal.choice(possible[chosen]),
                **{name: deal.choice(FREE[name]) for name in ("corner", "overlap", "delayed")},
            )
        )
    return tuple(cases)


# ---------------------------------------------------------------- covering sets

_NUMBER = {
    (name, choice): i for i, (name, choice) in enumerate((n, c) for n, choices in DIMENSIONS.items() for c in choices)
}
_CHOICE = {i: choice for (_, choice), i in _NUMBER.items()}
_DIMENSION_OF = [list(DIMENSIONS).index(name) for name, _ in _NUMBER]


def numbers_of(values: tuple, names: tuple[str, ...] = tuple(DIMENSIONS)) -> tuple[int, ...]:
    """Each choice as a number of its own."""
    return tuple(_NUMBER[name, value] for name, value in zip(names, values))


@cache
def combinations_of(strength: int, max_ranks: int = COVERED_RANKS) -> frozenset[tuple[int, ...]]:
    """Every `strength` choices of different dimensions that some case has, as ascending numbers; but for IN_PAIRS."""
    found = set()
    inside = [numbers_of(layout, tuple(LAYOUT)) for layout in layouts(max_ranks, NOT_COVERED)]
    free = [tuple(_NUMBER[name, choice] for choice in choices) for name, choices in FREE.items()]
    for taken in range(strength + 1):
        parts = {part for layout in inside for part in combinations(layout, taken)}
        for dims in combinations(free, strength - taken):
            found |= {part + rest for part in parts for rest in product(*dims)}
    left_out = {_NUMBER[choice] for choice in IN_PAIRS} if strength > 2 else set()
    return frozenset(numbers for numbers in found if left_out.isdisjoint(numbers))


@cache
def covering_cases(strength: int) -> tuple[Case, ...]:
    """Cases in which every `strength` choices that can stand together do; those of the smaller strength come first.

    Greedy and deterministic: the first combination that is missing is completed in several ways, each time with the free
    choices that add most, and the way that adds most for its cost is taken.
    """
    cases = list(covering_cases(strength - 1)) if strength > 2 else []
    missing = np.zeros((len(_NUMBER),) * strength, dtype=np.int32)
    for numbers in combinations_of(strength):
        for order in permutations(numbers):
            missing[order] = 1
    for case in cases:
        _strike(missing, numbers_of(case.choices))
    inside = np.array([numbers_of(layout, tuple(LAYOUT)) for layout in layouts(COVERED_RANKS, NOT_COVERED)])
    random = Random(strength)
    for numbers in sorted(combinations_of(strength)):
        if missing[numbers]:
            cases.append(_best_case(missing, inside, numbers, random))
            _strike(missing, numbers_of(cases[-1].choices))
    return tuple(cases)


@cache
def cases_of_each_choice() -> tuple[Case, ...]:
    """Few cases of the pairs in which every choice of every dimension stands once or more; greedy, of equals that of more ranks."""
    missing, chosen = set(_CHOICE) & {number for pair in combinations_of(2) for number in pair}, []
    while missing:
        chosen.append(
            max(covering_cases(2), key=lambda case: (len(missing & set(numbers_of(case.choices))), case.ranks))
        )
        missing -= set(numbers_of(chosen[-1].choices))
    return tuple(chosen)


def _best_case(missing: np.ndarray, inside: np.ndarray, seed: tuple[int, ...], random: Random) -> Case:
    """The best of some cases with the choices `seed`."""
    fixed = {_DIMENSION_OF[number]: number for number in seed}
    layout = {dim: number for dim, number in fixed.items() if dim < len(LAYOUT)}
    fits = np.flatnonzero((inside[:, list(layout)] == list(layout.values())).all(axis=1)).tolist()
    rows = inside[random.sample(fits, min(_CANDIDATES, len(fits)))]
    for dim, (name, choices) in list(enumerate(DIMENSIONS.items()))[len(LAYOUT) :]:
        options = [fixed[dim]] if dim in fixed else [_NUMBER[name, choice] for choice in choices]
        added = np.stack([_gain_of_next(missing, rows, option) for option in options])
        best = added + np.array([random.random() for _ in options])[:, None]  # a draw among equals
        rows = np.column_stack([rows, np.array(options)[best.argmax(axis=0)]])
    cases = [Case(*(_CHOICE[number] for number in row)) for row in rows.tolist()]
    gains = missing[_combined(rows, missing.ndim)].sum(axis=1)
    return max(zip(gains, cases), key=lambda pair: pair[0] / (60 + pair[1].cost))[1]


def _gain_of_next(missing: np.ndarray, rows: np.ndarray, option: int) -> np.ndarray:
    """Missing combinations that each row would newly have with one more choice."""
    return missing[option][_combined(rows, missing.ndim - 1)].sum(axis=1)


def _combined(rows: np.ndarray, strength: int) -> tuple[np.ndarray, ...]:
    """Where all `strength` choices of each row stand in the table of combinations: an index a choice, of [row, combination]."""
    dims = np.array(list(combinations(range(rows.shape[1]), strength)))  # [combination, strength]
    return tuple(rows[:, dims].transpose(2, 0, 1))


def _strike(missing: np.ndarray, numbers: tuple[int, ...]) -> None:
    missing[np.ix_(*[numbers] * missing.ndim)] = 0
