"""Megatron core's specs: a module and its arguments, as data."""

import inspect
from dataclasses import dataclass, field
from importlib import import_module as _import
from typing import Any

from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig


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


@dataclass(frozen=True)
class ContextSpec:
    """A part of a layer that is built as ours are: make(config, layer, context).

    config: our `ModelConfig`. layer: its number, from 0 over the whole model. context: a `LayerContext`.
    """

    make: MakePart


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


def context_arguments(part: type, settings: ModelConfig, layer_context: LayerContext) -> dict[str, Any]:
    """Return layer_context and settings, by name, for a class whose constructor names the first, or both."""
    named = inspect.signature(part).parameters
    if "layer_context" not in named:
        return {}
    arguments: dict[str, Any] = {"layer_context": layer_context}
    if "settings" in named:
        arguments["settings"] = settings
    return arguments


def build_part(
    spec: Any, settings: ModelConfig, layer_number: int, layer_context: LayerContext, /, **arguments: Any
) -> Any:
    """Build a part of a layer: from a `ContextSpec`, or with Megatron's arguments.

    settings, layer_number (from 1, over the whole model), layer_context: those of the layer. arguments: which every
    class of Megatron's must take in this place; it gets layer_number besides, if its signature names it, and what
    `context_arguments` returns.
    """
    if isinstance(spec, ContextSpec):
        return spec.make(settings, layer_number - 1, layer_context)
    part = get_module(spec)
    if isinstance(part, type):
        if "layer_number" in inspect.signature(part).parameters:
            arguments["layer_number"] = layer_number
        arguments |= context_arguments(part, settings, layer_context)
    return build_module(spec, **arguments)


def is_custom_part(spec: Any, *ours: type) -> bool:
    """Return whether a part of a spec is a script's own: neither missing, nor an identity, nor one of `ours`."""
    return spec is not None and get_module(spec) not in (IdentityOp, *ours)


__getattr__ = names_of_megatron(__name__)
