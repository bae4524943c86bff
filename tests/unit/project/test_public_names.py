"""A script that imports the public names of a file of Megatron core 0.16.1 finds them at the same path, where a file of ours stands there."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE, NOT_BUILT, SWITCHED_OFF

PUBLIC = json.loads((Path(__file__).parents[2] / "megatron_public_names.json").read_text())


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_a_path_of_megatron_has_megatrons_public_names(module: str):
    """tests/compat/public_names.py read them from Megatron's tree."""
    ours = import_module(module)
    missing = [name for name in PUBLIC[module].split() if not hasattr(ours, name)]
    assert not missing


@pytest.mark.parametrize("module", sorted(NOT_BUILT))
def test_a_name_that_is_not_built_is_refused_when_it_is_used(module: str):
    for name in NOT_BUILT[module].split():
        with pytest.raises(NotImplementedError, match=rf"{name}: not built; .+"):
            getattr(import_module(module), name)()


def test_no_optional_package_of_megatron_is_said_to_be_used():
    assert import_module("megatron.core.parallel_state").HAVE_EINOPS is False
    assert "HAVE_EINOPS" in SWITCHED_OFF.split()


@pytest.mark.parametrize("module", sorted({*ELSEWHERE, *NOT_BUILT}))
def test_the_tables_name_nothing_that_the_module_defines_itself(module: str):
    """Else a row would stay behind when a name is built."""
    own = vars(import_module(module))
    rows = [NOT_BUILT.get(module, ""), *ELSEWHERE.get(module, {}).values()]
    assert not {name for row in rows for name in row.split()} & own.keys()


def test_a_name_that_megatron_has_not_either_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'get_everything'"):
        getattr(import_module("megatron.core.utils"), "get_everything")  # noqa: B009
