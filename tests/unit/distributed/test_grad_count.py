"""How many gradients a backward gives a bucket: found out, by the times that it was entered."""

from megatron.core.distributed.grad_count import GradCounter


def backward(uses: GradCounter, entries: int, writes: int, microbatch: int = 0) -> tuple[list[int], list[int]]:
    """Forward and backward of a bucket "b": after which of its gradients it was through with values, and with gradients."""
    uses.begin(microbatch, backward=False)
    for _ in range(entries):
        uses.enter("b")
    uses.begin(microbatch, backward=True)
    done = [(uses.param_done("b"), uses.grad_done("b")) for _ in range(writes)]
    return [i for i, (passed, _) in enumerate(done, 1) if passed], [
        i for i, (_, written) in enumerate(done, 1) if written
    ]


def test_a_unit_entered_once_has_a_gradient_for_each_parameter():
    assert backward(GradCounter({"b": 3}, ["b"]), 1, 3) == ([3], [3])


def test_a_unit_entered_twice_is_kept_until_its_number_is_known():
    uses = GradCounter({"b": 2}, ["b"])
    assert backward(uses, 2, 3) == ([], [])
    assert backward(uses, 2, 3) == ([3], [3])
    assert backward(uses, 1, 2) == ([2], [2])  # each number of entries has its own
    assert backward(uses, 2, 3) == ([3], [3])


def test_what_the_model_says_holds_from_the_first_backward():
    assert backward(GradCounter({"b": 2}, []), 2, 2) == ([2], [2])


def test_a_backward_that_writes_less_does_not_make_the_next_give_up_too_early():
    uses = GradCounter({"b": 2}, ["b"])
    assert backward(uses, 1, 1) == ([], [])
    assert backward(uses, 1, 2) == ([2], [2])
    assert backward(uses, 1, 1) == ([], [])
    assert backward(uses, 1, 2) == ([2], [2])


def test_gradients_put_off_are_complete_when_as_many_are_written():
    """Two microbatches are passed over before the weight gradients of the first; one gradient in three is written at once."""
    uses = GradCounter({"b": 3}, ["b"])
    for microbatch in (0, 1):
        uses.begin(microbatch, backward=False)
        uses.enter("b")
    for microbatch in (0, 1):
        uses.begin(microbatch, backward=True, defers_wgrads=True)
        assert [uses.param_done("b") for _ in range(3)] == [False, False, True]
        assert not uses.grad_done("b")
    for microbatch in (0, 1):
        uses.begin(microbatch, backward=True)
        done = []
        for _ in range(2):
            assert not uses.param_done("b")  # its values are not there any more
            done.append(uses.grad_done("b"))
        assert done == [False, True]


def test_an_error_teaches_nothing():
    uses = GradCounter({"b": 2}, ["b"])
    uses.begin(0, backward=False)
    uses.enter("b")
    uses.begin(0, backward=True)
    uses.param_done("b")
    uses.forget()
    assert backward(uses, 1, 2) == ([2], [2])


def test_without_word_of_microbatches_each_round_of_gradients_counts():
    uses = GradCounter({"b": 2}, ["b"])
    assert [(uses.param_done("b"), uses.grad_done("b")) for _ in range(4)] == [(False, False), (True, True)] * 2
