"""Megatron's `mpu`: accessors of this process's `Mesh`, for scripts (Megatron: core/parallel_state.py).

Scripts also reach `parallel/init_and_destroy_distributed.py` and `initialize_model_parallel.py` through this module.
Library code does not use it: it receives `Axis` objects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.base.lazy_imports import not_built
from megatron.core.base.unsupported_arguments import CheckedArgument, accepts_defaults_only
from megatron.core.parallel.global_state import (  # noqa: F401
    announced,
    get_global_state,
    get_mesh,
    model_parallel_is_initialized,
    set_thread_mesh,
)
from megatron.core.parallel.init_and_destroy_distributed import (  # noqa: F401
    agreement_axis,
    available_backends,
    backend_of,
    has_joined,
    has_liveness,
    job_store,
    launched,
    launched_local_rank,
    launched_rank,
    launched_world_size,
    lost_rank,
    notices_lost_ranks,
    say_goodbye,
    shared_device_problem,
    start_distributed,
    stop_distributed,
    will_join,
    world_axis,
)
from megatron.core.parallel.initialize_model_parallel import (  # noqa: F401
    check_unchanged,
    destroy_model_parallel,
    initialize_model_parallel,
    torch_group,
)
from megatron.core.parallel.parallel_config import ORDER, ParallelConfig  # noqa: F401
from megatron.core.parallel.stage_to_rank import loop

# An argument that makes no difference here.
_ANY = CheckedArgument(lambda value, name: None, by_name=True)

# Accessors are made from the name of their axis.


def _group(axis: str) -> Callable[..., Any]:
    """Return an accessor of the axis's torch.distributed group.

    check_initialized False: it returns None before initialization, where it is an error otherwise.
    """

    def get(check_initialized: bool = True) -> Any:
        if not check_initialized and not model_parallel_is_initialized():
            return None
        return torch_group(axis)

    return get


def _rank(axis: str) -> Callable[[], int]:
    """Return an accessor of this process's position on the axis."""
    return lambda: _value(axis, "rank")


def _size(axis: str) -> Callable[[], int]:
    """Return an accessor of the axis's size."""
    return lambda: _value(axis, "size")


def _value(axis: str, kind: str) -> int:
    """Return "rank" or "size" of an axis; before the start the value that a setter was given."""
    if not model_parallel_is_initialized() and (axis, kind) in announced:
        return announced[axis, kind][1]
    return getattr(get_mesh()[axis], kind)


def _member(axis: str, offset: int = 0, *, from_this_rank: bool = False) -> Callable[[], int]:
    """Return an accessor of the global rank at `offset`, in a ring.

    offset: counted from the axis's first rank, or from this rank.
    """

    def get() -> int:
        ranks = get_mesh()[axis]
        start = ranks.rank if from_this_rank else 0
        return ranks.ranks[(start + offset) % ranks.size]

    return get


get_tensor_model_parallel_group = _group("tp")
get_tensor_model_parallel_rank = _rank("tp")
get_tensor_model_parallel_world_size = _size("tp")
get_tensor_model_parallel_src_rank = _member("tp")  # reads the data for its group

get_pipeline_model_parallel_group = _group("pp")
get_pipeline_model_parallel_rank = _rank("pp")
get_pipeline_model_parallel_world_size = _size("pp")
get_pipeline_model_parallel_next_rank = _member("pp", 1, from_this_rank=True)
get_pipeline_model_parallel_prev_rank = _member("pp", -1, from_this_rank=True)

get_context_parallel_group = _group("cp")
get_context_parallel_rank = _rank("cp")
get_context_parallel_world_size = _size("cp")
get_tensor_and_context_parallel_group = _group("tp_cp")
get_tensor_and_context_parallel_rank = _rank("tp_cp")
get_tensor_and_context_parallel_world_size = _size("tp_cp")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any] | None:
    """Return the groups of --cp-comm-type a2a+p2p.

    They are the neighbours that exchange heads, and the ring between groups of them.
    """
    if not check_initialized and not model_parallel_is_initialized():
        return None
    return [_group(name)() for name in ("cp_heads", "cp_ring")]


get_expert_model_parallel_group = _group("ep")
get_expert_model_parallel_rank = _rank("ep")
get_expert_model_parallel_world_size = _size("ep")
get_expert_model_parallel_src_rank = _member("ep")
get_expert_tensor_parallel_group = _group("etp")
get_expert_tensor_parallel_rank = _rank("etp")
get_expert_tensor_parallel_world_size = _size("etp")
get_expert_tensor_and_model_parallel_group = _group("ep_etp")
get_expert_tensor_and_model_parallel_rank = _rank("ep_etp")
get_expert_tensor_and_model_parallel_world_size = _size("ep_etp")
# of older releases, whose tensor-parallel ranks share each expert
get_tensor_and_expert_parallel_group = _group("ep_etp")
get_tensor_and_expert_parallel_rank = _rank("ep_etp")
get_tensor_and_expert_parallel_world_size = _size("ep_etp")
# with_egtp_remat, with_gtp_remat: no ranks divide weights that they gather again, so both groups are one
get_expert_tensor_model_pipeline_parallel_group = accepts_defaults_only(with_egtp_remat=_ANY)(_group("emp"))


def get_model_parallel_group(check_initialized: bool = True, *, with_expert_parallel: bool = False) -> Any:
    """Return the group of the ranks that hold one copy of the model; with_expert_parallel: with all its experts."""
    return _group("emp" if with_expert_parallel else "mp")(check_initialized)


get_model_parallel_src_rank = _member("mp")
get_embedding_group = _group("embd")
get_position_embedding_group = _group("pos_embd")


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    if not check_initialized and not model_parallel_is_initialized():
        return None
    return list(get_mesh()["cp"].ranks)


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of this pipeline's first stage."""
    mesh = get_mesh()
    return mesh["pp"].ranks[mesh.stages.rank_of_first]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of this pipeline's last stage."""
    mesh = get_mesh()
    return mesh["pp"].ranks[mesh.stages.rank_of_last]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the number of the running model chunk on this rank."""
    return get_global_state().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    get_global_state().virtual_rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return get_global_state().virtual_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    state = get_global_state()
    if world_size != state.virtual_size:
        state.mesh.stages = loop(state.mesh["pp"].size, world_size or 1)


# Megatron's tools set ranks and sizes to build another rank's shard. Layers here take an `Axis`, and would ignore the
# setting; so a setter accepts the actual value, or None, and refuses all others. Before the start it keeps the value,
# which `initialize_model_parallel` then compares with the actual one.
def _set(setter: str, axis: str, kind: str, value: int | None) -> None:
    if model_parallel_is_initialized():
        check_unchanged(setter, value, getattr(get_mesh()[axis], kind))
    elif value is None:
        announced.pop((axis, kind), None)
    else:
        announced[axis, kind] = (setter, value)


def _rank_setter(setter: str, axis: str) -> Callable[[int | None], None]:
    return lambda rank: _set(setter, axis, "rank", rank)


def _size_setter(setter: str, axis: str) -> Callable[[int | None], None]:
    return lambda world_size: _set(setter, axis, "size", world_size)


set_tensor_model_parallel_rank = _rank_setter("set_tensor_model_parallel_rank", "tp")
set_tensor_model_parallel_world_size = _size_setter("set_tensor_model_parallel_world_size", "tp")
set_pipeline_model_parallel_rank = _rank_setter("set_pipeline_model_parallel_rank", "pp")
set_pipeline_model_parallel_world_size = _size_setter("set_pipeline_model_parallel_world_size", "pp")
set_data_parallel_rank = _rank_setter("set_data_parallel_rank", "dp")
set_expert_model_parallel_rank = _rank_setter("set_expert_model_parallel_rank", "ep")
set_expert_model_parallel_world_size = _size_setter("set_expert_model_parallel_world_size", "ep")
set_expert_tensor_parallel_rank = _rank_setter("set_expert_tensor_parallel_rank", "etp")
set_expert_tensor_parallel_world_size = _size_setter("set_expert_tensor_parallel_world_size", "etp")


def _is_stage(stage: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Return whether the running chunk (or `vp_stage`) is `stage`.

    With `ignore_virtual`, whether any local chunk is.
    """
    state = get_global_state()
    local_stages = state.mesh.stages.of_rank(state.mesh["pp"].rank)
    if ignore_virtual or len(local_stages) == 1 or stage not in local_stages:
        return stage in local_stages
    chunk = state.virtual_rank if vp_stage is None else vp_stage
    if chunk is None:
        raise RuntimeError(
            "there is no current model chunk; pass vp_stage, or call set_virtual_pipeline_model_parallel_rank first"
        )
    return local_stages[chunk] == stage


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Return whether the running chunk (or `vp_stage`, or with `ignore_virtual` any chunk) is the first stage."""
    return _is_stage(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Return whether the running chunk (or `vp_stage`, or with `ignore_virtual` any chunk) is the last stage."""
    return _is_stage(get_mesh().stages.last, ignore_virtual, vp_stage)


def _inner_axis(axis: str, partial: bool) -> str:
    """Return the name of an axis, or of its inner part, whose ranks shard one copy of the optimizer state."""
    return f"{axis}_inner" if partial else axis


def _of_data(accessor: Callable[[str], Callable[[], Any]]) -> Callable[..., Any]:
    """Return an accessor of a data-parallel axis, with Megatron's arguments."""

    def get(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
        axis = _inner_axis("dp", partial_data_parallel)
        return accessor(f"{axis}_cp" if with_context_parallel else axis)()

    return get


def _of_expert_data(accessor: Callable[[str], Callable[[], Any]]) -> Callable[..., Any]:
    def get(partial_expert_data_parallel: bool = False) -> Any:
        return accessor(_inner_axis("edp", partial_expert_data_parallel))()

    return get


get_data_parallel_group = accepts_defaults_only(independent_all_gather=False)(_of_data(_group))
get_data_parallel_rank = _of_data(_rank)
get_data_parallel_world_size = _of_data(_size)
get_data_parallel_src_rank = _of_data(_member)


@accepts_defaults_only(with_gtp_remat=_ANY)
def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Any:
    return _group(_inner_axis("edp", partial_expert_data_parallel))(check_initialized)


get_expert_data_parallel_rank = accepts_defaults_only(with_gtp_remat=_ANY)(_of_expert_data(_rank))
get_expert_data_parallel_world_size = accepts_defaults_only(with_gtp_remat=_ANY)(_of_expert_data(_size))


def _of_data_modulo_expert(accessor: Callable[..., Any]) -> Callable[..., Any]:
    """Return an accessor of the ranks that have copies of the same experts, by its older name."""

    def get(*, with_context_parallel: bool = True, partial_expert_data_parallel: bool = False) -> Any:
        if not with_context_parallel and get_mesh()["cp"].size > 1:
            raise NotImplementedError(
                "the ranks with copies of the same experts include those of context parallelism; give with_context_parallel=True"
            )
        return accessor(partial_expert_data_parallel=partial_expert_data_parallel)

    return get


get_data_modulo_expert_parallel_group = _of_data_modulo_expert(get_expert_data_parallel_group)
get_data_modulo_expert_parallel_rank = _of_data_modulo_expert(get_expert_data_parallel_rank)


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """Return the data-parallel group of a job that runs on gloo; NotImplementedError otherwise."""
    return _on_gloo(get_data_parallel_group(with_context_parallel, partial_data_parallel), "get_data_parallel_group")


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> Any:
    """Return the expert-data-parallel group of a job that runs on gloo; NotImplementedError otherwise."""
    group = get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)
    return _on_gloo(group, "get_expert_data_parallel_group")


get_data_modulo_expert_parallel_group_gloo = _of_data_modulo_expert(get_expert_data_parallel_group_gloo)


def _on_gloo(group: Any, accessor: str) -> Any:
    """Return a group whose backend is gloo; NotImplementedError for another."""
    if group is not None and backend_of(group) != "gloo":
        raise NotImplementedError(f"a job with the backend {backend_of(group)} has no gloo groups; use {accessor}()")
    return group


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (or its running chunk, or `vp_stage`) shares the token embedding.

    By default the first stage does and, for the output layer, the last.
    """
    mesh = get_mesh()
    if ignore_virtual or not {0, mesh.stages.last} & {*mesh.stages.of_rank(mesh["pp"].rank)}:
        return mesh["pp"].ranks[mesh["pp"].rank] in mesh.embedding_ranks
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    mesh = get_mesh()
    return mesh["pp"].ranks[mesh["pp"].rank] in mesh.position_embedding_ranks


is_initialized = model_parallel_is_initialized  # Megatron's earlier name


def is_unitialized() -> bool:
    """Megatron's spelling of "uninitialized"."""
    return not model_parallel_is_initialized()


class GlobalMemoryBuffer:
    """Scratch tensors by name: a temporary tensor that every layer needs is allocated once."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return an uninitialized tensor [tensor_shape], in the memory of the last one of this name and dtype."""
        numel = torch.Size(tensor_shape).numel()
        buffer = self.buffer.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=get_global_state().device)
            self.buffer[name, dtype] = buffer
        return buffer[:numel].view(tuple(tensor_shape))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the process's buffer of scratch tensors, made on first use."""
    state = get_global_state()
    if state.memory_buffer is None:
        state.memory_buffer = GlobalMemoryBuffer()
    return state.memory_buffer


_SPLIT = "a stage of two stacks knows its layers; the split is the setting --pipeline-model-parallel-split-rank"
_NOT_BUILT = {
    "get_tensor_and_data_parallel_group": "use the tensor- and data-parallel groups one after the other",
    "get_amax_reduction_group": "8-bit numbers are not built yet",
    "get_pipeline_model_parallel_split_rank": _SPLIT,
    "is_pipeline_stage_before_split": _SPLIT,
    "is_pipeline_stage_after_split": _SPLIT,
}

# Megatron's variables of groups: what they hold is asked when they are read.
_GROUPS = {
    "_DATA_PARALLEL_GROUP": get_data_parallel_group,
    "_EMBEDDING_GROUP": get_embedding_group,
    "_MODEL_PARALLEL_GROUP": get_model_parallel_group,
    "_PIPELINE_MODEL_PARALLEL_GROUP": get_pipeline_model_parallel_group,
    "_TENSOR_MODEL_PARALLEL_GROUP": get_tensor_model_parallel_group,
}
_other = not_built(__name__, _NOT_BUILT)


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        return _GROUPS[name]() if model_parallel_is_initialized() else None
    return _other(name)
