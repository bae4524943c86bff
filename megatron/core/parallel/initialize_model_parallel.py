"""The mesh of a job is built from the sizes of its axes: one torch.distributed group per axis."""

import datetime
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.parallel.collectives import Communicator, TorchGroup, as_peer_error
from megatron.core.parallel.global_state import (
    announced,
    get_global_state,
    get_mesh,
    mesh_of_process,
    set_mesh_of_process,
)
from megatron.core.parallel.init_and_destroy_distributed import (
    launched,
    launched_rank,
    launched_world_size,
    leave_at_exit,
    stop_tcp_probes,
)
from megatron.core.parallel.mesh import MakeGroup, Mesh, StageRanks, build_mesh
from megatron.core.parallel.parallel_config import ORDER, ParallelConfig
from megatron.core.parallel.rank_grid import Axis, AxisSizes
from megatron.core.parallel.stage_to_rank import StageMap, loop

# Megatron's arguments after the third, in the order of its releases; a name -> the types of its values.
_SIZE = (int,)
_SWITCH = (bool,)
_TEXT = (str, type(None))
_COMMON_END = {"nccl_communicator_config_path": _TEXT, "distributed_timeout_minutes": _SIZE, "order": (str,)}
_AFTER_THIRD = (
    {  # the earliest
        "pipeline_model_parallel_split_rank": (int, type(None)),
        "use_sharp": _SWITCH,
        "context_parallel_size": _SIZE,
        "expert_model_parallel_size": _SIZE,
        **_COMMON_END,
    },
    {  # with sizes for instances and experts
        "pipeline_model_parallel_split_rank": (int, type(None)),
        "pipeline_model_parallel_comm_backend": _TEXT,
        "use_sharp": _SWITCH,
        "context_parallel_size": _SIZE,
        "hierarchical_context_parallel_sizes": (list, type(None)),
        "expert_model_parallel_size": _SIZE,
        "num_distributed_optimizer_instances": _SIZE,
        "expert_tensor_parallel_size": (int, type(None)),
        **_COMMON_END,
    },
    {  # without a split rank
        "pipeline_model_parallel_comm_backend": _TEXT,
        "use_sharp": _SWITCH,
        "context_parallel_size": _SIZE,
        "hierarchical_context_parallel_sizes": (list, type(None)),
        "hybrid_context_parallel": _SWITCH,
        "expert_model_parallel_size": _SIZE,
        "num_distributed_optimizer_instances": _SIZE,
        "expert_tensor_parallel_size": (int, type(None)),
        **_COMMON_END,
    },
)


def named_arguments(values: Sequence[Any]) -> dict[str, Any]:
    """Return Megatron's positional arguments after the third by name, without those that change nothing.

    Releases order them differently, so they are read as those of every release whose types they fit. TypeError if these
    disagree, or if there is none.
    """
    readings: list[dict[str, Any]] = []
    for names in _AFTER_THIRD:
        pairs = list(zip(names.items(), values))
        is_fitting = len(values) <= len(names) and all(type(value) in types for (_, types), value in pairs)
        if not is_fitting:
            continue
        reading = {}
        for (name, _), value in pairs:
            is_default = value is None or value is False or (name.endswith(("_size", "_instances")) and value == 1)
            if not is_default:
                reading[name] = value
        if reading not in readings:
            readings.append(reading)
    if len(readings) != 1:
        shown = ", ".join(map(repr, values))
        raise TypeError(
            f"initialize_model_parallel(..., {shown}): Megatron's releases have different arguments from the fourth on, and "
            f"these fit {'several of them' if readings else 'none of them'}; give them by name"
        )
    return readings[0]


def _with_positions_of_any_release(function: Callable[..., Mesh]) -> Callable[..., Mesh]:
    """Give the function all of Megatron's positional arguments, which differ from release to release."""

    @functools.wraps(function)
    def initialize(*values: Any, **by_name: Any) -> Mesh:
        named = named_arguments(values[3:]) if len(values) > 3 else {}
        twice = [name for name in named if name in by_name]
        if twice:
            raise TypeError(f"initialize_model_parallel() got {', '.join(twice)} by position and by name")
        return function(*values[:3], **named, **by_name)

    return initialize


@_with_positions_of_any_release
def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    ranks_per_kv_head: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = ORDER,
    stages: StageMap | None = None,
    get_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    **backend_options: Any,
) -> Mesh:
    """Create the groups of this job. Every rank must call once, after torch.distributed is initialised.

    A job of one rank may call without torch.distributed.

    16 ranks with tensor size 2 and pipeline size 4 (hence data-parallel size 2), in the default order:
        tp   [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]
        dp   [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]
        pp   [0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]
    Neighbouring ranks share a node, so the axis with the most traffic varies fastest.

    Experts have axes of their own over the ranks of a pipeline stage (`AxisSizes`): ep, etp and edp. expert_tensor_parallel_size:
    default the tensor size.
    stages: default a loop of virtual_pipeline_model_parallel_size chunks per rank.
    get_embedding_ranks(ranks of a pipeline) -> the ranks that share the token embedding; default the first and last.
    get_position_embedding_ranks: the same for the position embedding; default the first.
    backend_options: Megatron's options of communicators (use_sharp, ...); values that change nothing are ignored,
    others raise ConfigError, as does a size or a rank that is not what a setter of mpu was given before. Positional
    arguments after the third are read as those of the release of Megatron that they fit, see `named_arguments`.
    """
    if mesh_of_process() is not None:
        raise RuntimeError("model parallelism is initialised already; call destroy_model_parallel() first")
    _refuse_unbuilt({"pipeline_model_parallel_split_rank": pipeline_model_parallel_split_rank, **backend_options})
    cp_sizes = None
    if hierarchical_context_parallel_sizes is not None:
        cp_sizes = list(hierarchical_context_parallel_sizes)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        hierarchical_context_parallel_sizes=cp_sizes,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
    )
    if not dist.is_initialized() and launched_world_size() > 1:
        raise RuntimeError(
            f"{launched().launcher} started {launched_world_size()} processes, but torch.distributed is not "
            "initialised; first call torch.distributed.init_process_group(), or initialize_megatron(), which does "
            "both"
        )
    if dist.is_initialized():
        leave_at_exit()
    sizes = parallel.sizes(launched_world_size(), num_distributed_optimizer_instances, order)
    for (axis, kind), (setter, value) in announced.items():
        if kind == "size":
            check_unchanged(setter, value, getattr(sizes, axis))
    timeout = datetime.timedelta(minutes=distributed_timeout_minutes)

    # the options of `build_mesh`, equal on all ranks
    options: dict[str, Any] = {"ranks_per_kv_head": ranks_per_kv_head}
    if get_embedding_ranks is not None:
        options["embedding_ranks"] = stage_ranks(get_embedding_ranks)
    if get_position_embedding_ranks is not None:
        options["position_embedding_ranks"] = stage_ranks(get_position_embedding_ranks)
    options["stages"] = stages or loop(pipeline_model_parallel_size, virtual_pipeline_model_parallel_size or 1)

    make_group = _group_maker(sizes, timeout, options)
    mesh = build_mesh(sizes, launched_rank(), make_group, **options)
    for (axis, kind), (setter, value) in announced.items():
        check_unchanged(setter, value, getattr(mesh[axis], kind))
    announced.clear()
    set_mesh_of_process(mesh)
    stop_tcp_probes()
    return get_mesh()


def check_unchanged(setter: str, value: int | None, actual: int) -> None:
    """Raise ConfigError if a setter of mpu was given another value than the actual one. None is no value."""
    if value not in (None, actual):
        raise ConfigError(
            f"{setter}({value}): the value is {actual} and cannot be changed; start processes for the layout that "
            "you want, with --tensor-model-parallel-size and --pipeline-model-parallel-size (a checkpoint loads into "
            "any layout)"
        )


_world_of_first_mesh: Any = None  # the torch.distributed group of all ranks for which a mesh has been made


def _group_maker(sizes: AxisSizes, timeout: datetime.timedelta, options: dict[str, Any]) -> MakeGroup:
    """Return the function that makes the groups of this rank's mesh.

    In a job's first mesh the members of a group make it by themselves: start-up costs no world-wide collective per
    group. In a second mesh, or after a script's own `new_group`, all ranks make all groups: torch then names a group by
    its ranks and by the number of groups that a member has had, which is unequal (a stage between the first and the
    last is in no embedding group).
    """
    global _world_of_first_mesh

    def make(name: str, ranks: tuple[int, ...], *, by_members: bool = True) -> Communicator:
        with as_peer_error():
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=by_members, group_desc=name)
        return TorchGroup(group)

    is_first = _world_of_first_mesh is None or _world_of_first_mesh is not dist.group.WORLD
    # torch counts a call of new_group on every rank, in the group or not; the group of all ranks is the first
    has_others = dist.is_initialized() and dist.distributed_c10d.get_pg_count() > 1
    _world_of_first_mesh = dist.group.WORLD
    if launched_world_size() == 1 or (is_first and not has_others):
        return make

    # list the groups of all ranks, in one order, by building every rank's mesh without communicators
    keys: dict[tuple[str, tuple[int, ...]], None] = {}
    for rank in range(launched_world_size()):
        build_mesh(sizes, rank, lambda name, ranks: keys.setdefault((name, ranks)), **options)
    groups = {key: make(*key, by_members=False) for key in keys}
    return lambda name, ranks: groups[name, ranks]


def destroy_model_parallel() -> None:
    """Drop the mesh. The torch.distributed groups live until torch.distributed ends."""
    set_mesh_of_process(None)


def torch_group(name: str) -> Any:
    """Return the torch.distributed group of an axis.

    For an axis of one rank it is a group of that rank, made on first use: torch takes None for all ranks of the job.
    """
    state = get_global_state()
    axis = state.mesh[name]
    if axis.group is None and dist.is_initialized():
        if state.group_of_one is None:
            state.group_of_one = dist.new_group([axis.ranks[0]], use_local_synchronization=True)
        return state.group_of_one
    return axis.group.process_group if isinstance(axis.group, TorchGroup) else axis.group


def axis_of_group(group: Any) -> Axis:
    """Return the axis of the mesh whose ranks are those of a torch.distributed group, in the same order.

    A group of a script's own stands for the axis, whose communicator is used. Raises ValueError if there is none.
    """
    ranks = ranks_of_group(group)
    for axis in get_mesh().values():
        if axis.ranks == ranks:
            return axis
    raise ValueError(
        f"no axis of this job has the ranks of the given group, {ranks}; give a group of parallel_state, or one of the same "
        "ranks in the same order"
    )


def ranks_of_group(group: Any) -> tuple[int, ...] | None:
    """Return the global ranks of a torch.distributed group, in their order; None: it is no group."""
    for name, axis in get_mesh().items():
        if axis.group is not None and torch_group(name) is group:
            return axis.ranks
    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None


# Megatron's other arguments, mostly of communicators -> the values that change nothing here.
_IGNORED_VALUES = {
    "pipeline_model_parallel_split_rank": (None,),
    "pipeline_model_parallel_comm_backend": (None,),
    "nccl_communicator_config_path": (None,),
    "high_priority_stream_groups": (None, []),
    "use_sharp": (False,),
    "sharp_enabled_group": (None,),
    "hybrid_context_parallel": (False,),
    "create_all_gather_group": (False,),
    "encoder_tensor_model_parallel_size": (0,),
    "encoder_pipeline_model_parallel_size": (0, None),
    "create_gloo_process_groups": (True, False),
}


def _refuse_unbuilt(backend_options: Mapping[str, Any]) -> None:
    unknown = backend_options.keys() - _IGNORED_VALUES.keys()
    if unknown:
        raise TypeError(f"initialize_model_parallel() has no arguments {sorted(unknown)}")
    problems = []
    for name, value in backend_options.items():
        if value not in _IGNORED_VALUES[name]:
            problems.append(f"{name}={value!r} is not built yet; leave it out")
    if problems:
        raise ConfigError(problems)


def stage_ranks(choose: Callable[..., Sequence[int]]) -> StageRanks:
    """Return a script's choice of pipeline ranks as a function of tuples.

    In earlier releases the script's function has a second argument, the encoder-decoder split.
    """
    if len(inspect.signature(choose).parameters) > 1:
        return lambda ranks: tuple(choose(list(ranks), None))
    return lambda ranks: tuple(choose(list(ranks)))
