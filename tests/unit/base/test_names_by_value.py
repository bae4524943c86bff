"""The tables that scripts add to: an entry that cannot work is refused in the line that adds it."""

import pytest
from said import raises_telling

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.ops.attention.kernels import KERNELS, Kernel
from megatron.core.optimizer import OPTIMIZERS, UpdateRule
from megatron.core.optimizer.optimizer_flags_and_registry import OptimizerConfig
from megatron.core.pipeline_parallel import SCHEDULES
from megatron.core.tokenizers import TOKENIZERS, TokenizerType


def window(*tensors):
    raise AssertionError("a table only looks at its entries")


@pytest.mark.parametrize(
    ("table", "entry", "said"),
    [
        (KERNELS, window, "KERNELS['mine'] Kernel compute refuses"),
        (KERNELS, Kernel(window, refuses="never"), "KERNELS['mine'] Kernel compute refuses"),
        (OPTIMIZERS, window, "OPTIMIZERS['mine'] UpdateRule update states"),
        (OPTIMIZERS, UpdateRule(window, ("momentum",)), "OPTIMIZERS['mine'] UpdateRule update states"),
        (SCHEDULES, lambda p, m: [], "SCHEDULES['mine'] p m v"),
        (SCHEDULES, [[]], "SCHEDULES['mine'] p m v"),
        (TOKENIZERS, window, "TOKENIZERS['mine'] TokenizerType build needs"),
        (TOKENIZERS, TokenizerType(window, needs=("vocab_file")), "TOKENIZERS['mine'] TokenizerType build needs"),
    ],
)
def test_an_entry_of_another_form_is_refused_where_it_is_added(table, entry, said):
    before = dict(table)
    for add in (table.__setitem__, lambda name, it: table.update({name: it}), table.setdefault):
        with raises_telling(TypeError, said):
            add("mine", entry)
    assert dict(table) == before


@pytest.mark.parametrize("states", [None, "momentum", (1,)])
def test_states_without_names_are_refused_when_the_optimizer_is_chosen(monkeypatch, states):
    monkeypatch.setitem(OPTIMIZERS, "mine", UpdateRule(window, lambda config: states))
    with raises_telling(ConfigError, f"states OPTIMIZERS['mine'] {states!r}"):
        OptimizerConfig(optimizer="mine").rule()
