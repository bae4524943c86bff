"""Megatron's own signatures, for the code of a fork: layers, regions, generators, small helpers.

A function here takes Megatron's arguments, finds the rest (axis, device) in the current mesh, and calls the function that
receives everything it uses. Megatron's import paths (`megatron.core.tensor_parallel.layers`, `megatron.core.utils`, ...) load
these names on first use. `megatron.core.parallel_state` holds Megatron's accessors of ranks.

May import: every floor of core below. Only `megatron.training` imports from here.
To add a name: define it here, and list it in the module of Megatron's path (`lazy_names`) and in `tests/pure/test_names.py`.
"""
