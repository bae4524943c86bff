"""Few cases in which all combinations of some choices occur, where not every choice can stand with every other. Pure."""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heapreplace
from itertools import combinations, product
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")


class Combined:
    """A case: a dataclass with a field for each dimension, in their order. Of those in a covering set, `ranks` says how many there
    are, and `can_be` whether the choices can stand together."""

    ranks: int
    can_be: bool

    @property
    def choices(self) -> tuple:
        """One of each dimension, in their order."""
        return tuple(map(self.__dict__.__getitem__, self.__dataclass_fields__))


_CANDIDATES = 60  # completions looked at for each case


def covering(
    make: Callable[..., Combined],
    dimensions: Mapping[str, tuple],
    strength: int,
    *,
    seeds: Iterable[Mapping[str, Any]],
    chosen: Iterable[Combined] = (),
    only: tuple[str, ...] = (),
) -> tuple[Combined, ...]:
    """`chosen` and more cases, until every `strength` choices of different dimensions that can stand together do.

    make: a case, of a choice by the name of each dimension. seeds: cases that can be, with few features: choices that can stand
    with none of them are taken for impossible. only: of combinations with one of these dimensions. Greedy, and the same every
    time: what adds most for its ranks.
    """
    cases, seeds = list(chosen), [dict(seed) for seed in seeds]
    # A combination is the sum of its choices' numbers, each a power of two: integers are looked up sooner than tuples of pairs.
    named = [(name, choice) for name, choices in dimensions.items() for choice in choices]
    numbers = {pair: 1 << bit for bit, pair in enumerate(named)}
    wanted = [
        i
        for i, names in enumerate(combinations(dimensions, strength))
        if not only or any(name in only for name in names)
    ]

    def parts(case: Combined) -> list[int]:
        ones = [numbers[pair] for pair in zip(dimensions, case.choices)]
        sums = list(map(sum, combinations(ones, strength)))
        return [sums[i] for i in wanted] if only else sums

    missing = {sum(numbers[pair] for pair in part): part for part in _possible(make, dimensions, strength, seeds, only)}
    for part in (part for case in cases for part in parts(case)):
        missing.pop(part, None)
    random = Random(strength)
    while missing:
        seed = dict(next(iter(missing.values())))
        drawn = ({name: random.choice(values) for name, values in dimensions.items()} for _ in range(_CANDIDATES))
        fits = [case for case in (make(**(others | seed)) for others in drawn) if case.can_be]
        fits += [case for others in seeds if (case := make(**(others | seed))).can_be]
        gains = [(sum(map(missing.__contains__, parts(case))), case) for case in fits]
        cases.append(max(gains, key=lambda pair: pair[0] / (8 + pair[1].ranks))[1])
        for part in parts(cases[-1]):
            missing.pop(part, None)
    return tuple(cases)


def _possible(
    make: Callable[..., Combined],
    dimensions: Mapping[str, tuple],
    strength: int,
    seeds: list[dict[str, Any]],
    only: tuple[str, ...],
) -> list[tuple]:
    found = []
    for names in combinations(dimensions, strength):
        if only and not set(names) & set(only):
            continue
        for choices in product(*(dimensions[name] for name in names)):
            part = tuple(zip(names, choices))
            if any(make(**(others | dict(part))).can_be for others in seeds):
                found.append(part)
    return found


def cover(cases: Iterable[T], contents: Callable[[T], frozenset], chosen: Iterable[T] = ()) -> tuple[T, ...]:
    """`chosen` and more of the cases, until all contents of all cases occur; each the one that adds most."""
    found, has = list(chosen), {case: contents(case) for case in cases}
    missing = frozenset().union(*has.values()).difference(*(has[case] for case in found))
    # What a case would add only shrinks: what it would have added earlier says of most that they are not the best.
    adds = [(-len(inside), number, case) for number, (case, inside) in enumerate(has.items())]
    heapify(adds)
    while missing:
        _, number, case = adds[0]
        now = (-len(has[case] & missing), number, case)
        if now > heapreplace(adds, now):
            continue
        found.append(case)
        missing -= has[case]
    return tuple(found)
