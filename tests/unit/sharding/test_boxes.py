"""Runs of elements as boxes: against numbering the elements of a small tensor one by one."""

from itertools import product
from math import prod

import pytest

from megatron.core.sharding.boxes import flat_range_to_boxes, flat_start, pieces_in_flat_range


def numbers(box, shape) -> list[int]:
    """The row-major numbers of the elements of a box."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    points = product(*(range(start, stop) for start, stop in box))
    return [sum(at * stride for at, stride in zip(point, strides)) for point in points]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2)])
def test_the_boxes_of_a_run_are_its_elements_in_order(shape):
    for start, stop in ((a, b) for a in range(prod(shape) + 1) for b in range(a, prod(shape) + 1)):
        boxes = flat_range_to_boxes(start, stop, shape)
        assert [n for box in boxes for n in numbers(box, shape)] == list(range(start, stop))
        assert [flat_start(box, shape) for box in boxes] == [numbers(box, shape)[0] for box in boxes]


def test_the_pieces_of_a_run_name_each_element_by_its_place_in_the_whole():
    # A gate|up matrix of 8 rows of 3, of which this rank holds rows 2:4 and 6:8 as a local (4, 3).
    pairs = [(((2, 4), (0, 3)), ((0, 2), (0, 3))), (((6, 8), (0, 3)), ((2, 4), (0, 3)))]
    whole_of = {local: (local + 6 if local < 6 else local + 12) for local in range(12)}
    for start, stop in ((a, b) for a in range(13) for b in range(a, 13)):
        found = {}
        for box, ((first, last),) in pieces_in_flat_range(pairs, (start, stop), (4, 3)):
            found |= dict(zip(range(first, last), numbers(box, (8, 3)), strict=True))
        assert found == {local - start: whole_of[local] for local in range(start, stop)}
