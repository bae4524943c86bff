"""Megatron core's specs: a module and its arguments, as data."""

from dataclasses import dataclass, field
from importlib import import_module as _import
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp


@dataclass
class ModuleSpec:
    """A module to build: its class and arguments, as data.

    module: the class, or (path, name) of one. params: the arguments that the spec adds. submodules: the specs
    of its parts.
    """

    module: type | tuple[str, str]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the object `name` of the module at `path`, for (path, name)."""
    path, name = module_path
    return getattr(_import(path), name)


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Return the class or function that a spec names."""
    del additional_kwargs  # in Megatron's signature
    module = getattr(spec_or_module, "module", spec_or_module)
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the module that a spec describes, with these arguments and its own; a function is returned as it is."""
    module = get_module(spec_or_module)
    if not isinstance(module, type):
        return module
    if getattr(spec_or_module, "submodules", None) is not None:
        kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **getattr(spec_or_module, "params", {}), **kwargs)
    except Exception as error:
        error.add_note(f"while {module.__name__} was built from its spec")
        raise


def is_custom_part(spec: Any, *ours: type) -> bool:
    """Return whether a part of a spec is a script's own: neither missing, nor an identity, nor one of `ours`."""
    return spec is not None and get_module(spec) not in (IdentityOp, *ours)
