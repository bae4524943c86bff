"""Specs of Megatron core: a module and its arguments, as data."""

from dataclasses import dataclass, field
from importlib import import_module as _import
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp


@dataclass
class ModuleSpec:
    """A module to build: its class, or (path, name) of one; the arguments that the spec adds; the specs of its parts."""

    module: type | tuple[str, str]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)


def import_module(module_path: tuple[str, str]) -> Any:
    """The object `name` of the module at `path`, for (path, name)."""
    path, name = module_path
    return getattr(_import(path), name)


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """The class or function that a spec names."""
    del additional_kwargs  # in Megatron's signature
    named = getattr(spec_or_module, "module", spec_or_module)
    return import_module(named) if isinstance(named, tuple) else named


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module that a spec describes, built with these arguments and its own; a function is returned as it is."""
    made = get_module(spec_or_module)
    if not isinstance(made, type):
        return made
    if getattr(spec_or_module, "submodules", None) is not None:
        kwargs["submodules"] = spec_or_module.submodules
    try:
        return made(*args, **getattr(spec_or_module, "params", {}), **kwargs)
    except Exception as error:
        error.add_note(f"while {made.__name__} was built from its spec")
        raise


def _is_own(spec: Any, *ours: type) -> bool:
    """Whether a part of a spec is the user's."""
    return spec is not None and get_module(spec) not in (IdentityOp, *ours)
