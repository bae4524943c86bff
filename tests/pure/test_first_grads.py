"""Which gradients are set to zero before a step: a table written by hand."""

from megatron.core.distributed.first_grads import FirstGrads

RUNS = {"a": (0, 3), "b": (4, 6), "c": (6, 7)}  # 3 and 7 are gaps of alignment


def test_all_are_zeros_until_a_product_came_first():
    grads = FirstGrads(RUNS, 8)
    grads.begin()
    assert (grads.zeroed, grads.left) == ([(0, 8)], [])
    assert grads.open("b", overwrites=True) == (False, False)  # there are zeros: adding is as good
    assert grads.open("b", overwrites=True) == (False, False)
    assert grads.open("c", overwrites=False) == (False, False)
    assert grads.open("c", overwrites=True) == (False, False)  # not the first
    grads.begin()
    assert (grads.zeroed, grads.left, grads.unset) == ([(0, 4), (6, 8)], [(4, 6)], {"b"})


def test_what_is_left_is_overwritten_or_set_to_zero_once():
    grads = FirstGrads(RUNS, 8)
    grads.begin()
    for name in RUNS:
        grads.open(name, overwrites=True)
    grads.begin()
    assert (grads.zeroed, grads.left, grads.unset) == ([(3, 4), (7, 8)], list(RUNS.values()), set(RUNS))
    assert grads.open("a", overwrites=True) == (False, True)
    assert grads.open("a", overwrites=True) == (False, False)
    assert grads.open("b", overwrites=False) == (True, False)
    assert grads.open("b", overwrites=True) == (False, False)
    assert grads.unset == {"c"}  # whoever sums the gradients finds that nobody came
    grads.begin()
    assert grads.unset == set(RUNS)
