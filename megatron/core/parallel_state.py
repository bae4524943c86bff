"""The process-group registry (`mpu`): the one `Mesh` of this process (`mesh.py`), and Megatron's accessors over it, a line each.

`mpu.initialize_model_parallel` is called once by every rank. Code below the composition root never reads the registry: it is
handed the `Axis` objects that it uses.
"""

import atexit
import datetime
import gc
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Imported later (torch.optim does), its functions would take the job's group as a default value and keep it, and its threads,
# alive after destroy_process_group. Seen in torch 2.13.
import torch.distributed.nn.functional

from megatron.core.comm import Group, Ledger, TorchGroup
from megatron.core.config import ConfigError, knob
from megatron.core.grid import Axis, Grid, grid_of
from megatron.core.launch import Launch, discover
from megatron.core.lazy import not_built
from megatron.core.mesh import Mesh, StageRanks, build_mesh, first_and_last

ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism."""

    tensor_model_parallel_size: int = knob(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = knob(1, "stages that the layers are divided into")
    sequence_parallel: bool = knob(False, "divide norms and dropout along the sequence over the tensor-parallel ranks")
    context_parallel_size: int = knob(1, "ranks that share each sequence")
    expert_model_parallel_size: int = knob(1, "ranks that share the experts")
    num_layers_per_virtual_pipeline_stage: int | None = knob(None, "layers of each chunk of the interleaved schedule")
    num_virtual_stages_per_pipeline_rank: int | None = knob(
        None, "chunks of each pipeline rank, the other way to say it"
    )
    pipeline_schedule: str | None = knob(
        None,
        "order of forwards and backwards: 1f1b, interleaved, gpipe, zb-h1, or a fork's own; 1f1b, or interleaved with "
        "several chunks per rank, when unset",
    )
    decoder_first_pipeline_num_layers: int | None = knob(
        None, "layers of the first pipeline rank, if not its equal share"
    )
    decoder_last_pipeline_num_layers: int | None = knob(
        None, "layers of the last pipeline rank, if not its equal share"
    )
    account_for_embedding_in_pipeline_split: bool = knob(False, "count the embedding as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool = knob(
        False, "count the output layer and loss as a layer of the last stage"
    )
    scatter_gather_tensors_in_pipeline: bool = knob(
        True, "send a boundary tensor that all tensor-parallel ranks hold in parts"
    )
    use_tp_pp_dp_mapping: bool = knob(False, "place pipeline ranks next to tensor ranks: order tp-cp-ep-pp-dp")

    def __post_init__(self) -> None:
        problems = [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
            for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
            if getattr(self, name) < 1
        ]
        for name, what in (("context_parallel_size", "context"), ("expert_model_parallel_size", "expert")):
            if getattr(self, name) != 1:
                flag = f"--{name.replace('_', '-')}"
                problems.append(f"{flag} is {getattr(self, name)}, but {what} parallelism is not built yet; use 1")
        for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                problems.append(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if None not in (self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank):
            problems.append(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same; give one"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def sequence_parallel_on(self) -> bool:
        """Sequence parallelism divides over tensor-parallel ranks, so with one of them there is nothing to divide."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def order(self) -> str:
        return "tp-cp-ep-pp-dp" if self.use_tp_pp_dp_mapping else ORDER


# ---------------------------------------------------------------- joining the other processes

_joined = False  # whether start_distributed has initialised torch.distributed, and not the caller


def will_join() -> bool:
    """Whether `start_distributed` will make a process group: there is none yet, and a launcher started this process."""
    return not dist.is_initialized() and _has_others_to_meet(discover(os.environ))


def _has_others_to_meet(launch: Launch) -> bool:
    return launch.address is not None and (launch.world_size > 1 or launch.launcher == "torchrun")


def start_distributed(backend: str, timeout_minutes: int) -> None:
    """Join the job: adopt torch.distributed if the caller has initialised it, else go by what the launcher says (`launch.py`).

    A process that no launcher started is a job of one, and needs no torch.distributed at all. Raises ConfigError.
    """
    global _joined
    if dist.is_initialized():
        atexit.register(_leave_what_the_caller_joined)
        return
    launch = discover(os.environ)
    if not _has_others_to_meet(launch):
        return
    try:
        dist.init_process_group(
            backend,
            init_method=launch.meeting_point,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=datetime.timedelta(minutes=timeout_minutes),
        )
    except dist.DistError as error:
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.address}:{launch.port} "
            f"({str(error).splitlines()[0].rstrip('.')}): a rank has ended already and says why where it prints, or was not started, or "
            "looks elsewhere, or another job has that port; check the number of processes, MASTER_ADDR and MASTER_PORT"
        ) from error
    _joined = True


def stop_distributed() -> None:
    """Leave the job that `start_distributed` joined; a process group that the caller made stays.

    The groups must be gone before the interpreter ends: gloo's threads, found alive by then, abort the process.
    """
    global _joined
    if _mesh is not None:
        for axis in _mesh.values():
            if isinstance(axis.group, TorchGroup):
                axis.group.process_group = None
        _mesh.kept.clear()
    destroy_model_parallel()
    if _joined:
        gc.collect()  # graphs of the last step hold axes in circles
        dist.destroy_process_group()
        _joined = False


def _leave_what_the_caller_joined() -> None:
    """At the end of the interpreter, for a caller who made a process group and did not destroy it: for the same reason."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def available_backends() -> list[str]:
    """The back ends that this torch was built with."""
    if not dist.is_available():
        return []
    return [
        name
        for name in dist.Backend.backend_list
        if name not in ("undefined", "fake") and dist.is_backend_available(name)
    ]


def has_joined() -> bool:
    """Whether torch.distributed is initialised, by us or by the caller."""
    return dist.is_initialized()


def job_store() -> dist.Store | None:
    """Where the processes of a job left word for one another when they met, and may again; None for a job of one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def world_axis() -> Axis:
    """All ranks of the job, before there is a mesh: for agreeing on how to make one."""
    ranks = tuple(range(launched_world_size()))
    group = TorchGroup(dist.group.WORLD) if dist.is_initialized() and len(ranks) > 1 else None
    return Axis("world", ranks, launched_rank(), group, Ledger())


def launched() -> Launch:
    """What the launcher says of this process; of variables that cannot be (`start_distributed` refuses them), nothing."""
    try:
        return discover(os.environ)
    except ConfigError:
        return Launch()


def launched_rank() -> int:
    """The global rank of this process, before or after the job is joined."""
    return dist.get_rank() if dist.is_initialized() else launched().rank


def launched_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else launched().world_size


def launched_local_rank() -> int:
    """The rank within this node, which picks the device. A caller who has joined by himself need not have told anybody."""
    launch = launched()
    return launched_rank() if launch.launcher == "none" else launch.local_rank


# ---------------------------------------------------------------- the registry

_mesh: Mesh | None = None
_override = threading.local()  # a test that runs ranks as threads gives each thread its own mesh


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    num_distributed_optimizer_instances: int = 1,
    ranks_per_kv_head: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = ORDER,
    get_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    **of_back_ends: Any,
) -> Mesh:
    """Create the groups of this job. Every rank must call, once, after torch.distributed is initialised (or without it,
    as a job of one rank).

    16 ranks with tensor size 2 and pipeline size 4 (hence data-parallel size 2), in the default order:
        tp   [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]
        dp   [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]
        pp   [0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]
    Neighbouring ranks share a node, so the chattiest axis varies fastest.

    get_embedding_ranks(ranks of a pipeline) -> those of them that share the word table, if not the first and the last;
    get_position_embedding_ranks likewise, if not the first. `of_back_ends`: Megatron's settings of communicators (use_sharp, ...);
    those that ask for nothing are passed over, others raise ConfigError.
    """
    global _mesh
    if _mesh is not None:
        raise RuntimeError("model parallelism is initialised already; call destroy_model_parallel() first")
    _refuse_unbuilt(context_parallel_size, expert_model_parallel_size, expert_tensor_parallel_size, of_back_ends)
    if not dist.is_initialized() and launched_world_size() > 1:
        raise RuntimeError(
            f"{launched().launcher} started {launched_world_size()} processes, but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first, or initialize_megatron(), which does both"
        )
    grid = grid_for(
        launched_world_size(),
        tensor=tensor_model_parallel_size,
        pipeline=pipeline_model_parallel_size,
        replicas=num_distributed_optimizer_instances,
        order=order,
    )
    timeout = datetime.timedelta(minutes=distributed_timeout_minutes)

    def make_group(name: str, ranks: tuple[int, ...]) -> Group:
        # Only the members meet, so start-up does not cost a collective of everyone for every group of the job.
        return TorchGroup(dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name))

    chosen = {"embedding_ranks": get_embedding_ranks, "position_embedding_ranks": get_position_embedding_ranks}
    chosen = {name: _stage_ranks(choose) for name, choose in chosen.items() if choose is not None}
    _mesh = build_mesh(grid, launched_rank(), make_group, ranks_per_kv_head, **chosen)
    _mesh.virtual_size = virtual_pipeline_model_parallel_size
    return _mesh


_OF_BACK_ENDS = {  # Megatron's arguments about communicators, and the values that change nothing here
    "pipeline_model_parallel_split_rank": (None,),
    "pipeline_model_parallel_comm_backend": (None,),
    "hierarchical_context_parallel_sizes": (None,),
    "nccl_communicator_config_path": (None,),
    "high_priority_stream_groups": (None, []),
    "use_sharp": (False,),
    "create_gloo_process_groups": (True, False),
}


def _refuse_unbuilt(context: int, expert: int, expert_tensor: int | None, of_back_ends: Mapping[str, Any]) -> None:
    sizes = {"context": context, "expert": expert}
    problems = [f"{name} parallelism of size {n} is not built yet; use 1" for name, n in sizes.items() if n != 1]
    if expert_tensor is not None:
        problems.append(f"an expert tensor-parallel size ({expert_tensor}) is not built yet; leave it out")
    if strange := of_back_ends.keys() - _OF_BACK_ENDS.keys():
        raise TypeError(f"initialize_model_parallel() has no arguments {sorted(strange)}")
    asked = {name: value for name, value in of_back_ends.items() if value not in _OF_BACK_ENDS[name]}
    problems += [f"{name}={value!r} is not built yet; leave it out" for name, value in asked.items()]
    if problems:
        raise ConfigError(problems)


def _stage_ranks(choose: Callable[..., Sequence[int]]) -> StageRanks:
    """A script's choice of pipeline ranks; up to Megatron core 0.12 it is also told the split of an encoder and a decoder."""
    takes_split = len(inspect.signature(choose).parameters) > 1
    return lambda stages: tuple(choose(list(stages), None) if takes_split else choose(list(stages)))


def grid_for(world_size: int, *, tensor: int, pipeline: int, replicas: int = 1, order: str = ORDER) -> Grid:
    """The grid of a job; its data-parallel size is what the other axes leave. Raises ConfigError when they do not fit."""
    model = tensor * pipeline
    if world_size % (model * replicas):
        raise ConfigError(
            f"world size {world_size} is not a multiple of {model * replicas} = tensor-model-parallel-size ({tensor}) x "
            f"pipeline-model-parallel-size ({pipeline})" + (f" x optimizer instances ({replicas})" if replicas > 1 else "")
            + "; start another number of processes or change the sizes"
        )  # fmt: skip
    inner = world_size // (model * replicas)
    return grid_of(order, {"tp": tensor, "pp": pipeline, "dp_outer": replicas, "dp_inner": inner})


def get_mesh() -> Mesh:
    """The mesh of this process (of this thread, inside `use_mesh`)."""
    mesh = getattr(_override, "mesh", None) or _mesh
    if mesh is None:
        raise RuntimeError("model parallelism is not initialised; call initialize_model_parallel() first")
    return mesh


def use_mesh(mesh: Mesh | None) -> None:
    """Make `mesh` the current one of this thread only; None goes back to the process' own. For tests."""
    _override.mesh = mesh


def model_parallel_is_initialized() -> bool:
    return (getattr(_override, "mesh", None) or _mesh) is not None


def destroy_model_parallel() -> None:
    """Forget the mesh. The torch.distributed groups go when torch.distributed does."""
    global _mesh
    _mesh = None


# ---------------------------------------------------------------- Megatron's names


def _group(name: str) -> Any:
    """The torch.distributed group of an axis. One of a single rank is made when first asked for, by that rank alone: None, which
    an axis of one rank has inside, would mean all ranks of the job to torch."""
    mesh = get_mesh()
    axis = mesh[name]
    if axis.group is None and dist.is_initialized():
        if "group of one" not in mesh.kept:
            mesh.kept["group of one"] = dist.new_group([axis.ranks[0]], use_local_synchronization=True)
        return mesh.kept["group of one"]
    return axis.group.process_group if isinstance(axis.group, TorchGroup) else axis.group


def get_tensor_model_parallel_group() -> Any:
    return _group("tp")


def get_tensor_model_parallel_rank() -> int:
    return get_mesh()["tp"].rank


def get_tensor_model_parallel_world_size() -> int:
    return get_mesh()["tp"].size


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank that reads data for this tensor-parallel group."""
    return get_mesh()["tp"].ranks[0]


def get_pipeline_model_parallel_group() -> Any:
    return _group("pp")


def get_pipeline_model_parallel_rank() -> int:
    return get_mesh()["pp"].rank


def get_pipeline_model_parallel_world_size() -> int:
    return get_mesh()["pp"].size


def get_pipeline_model_parallel_first_rank() -> int:
    return get_mesh()["pp"].ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return get_mesh()["pp"].ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    pp = get_mesh()["pp"]
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    pp = get_mesh()["pp"]
    return pp.ranks[(pp.rank - 1) % pp.size]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The model chunk of this rank that is running."""
    return get_mesh().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    get_mesh().virtual_rank = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return get_mesh().virtual_size


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    get_mesh().virtual_size = world_size


# Megatron's tools set ranks and sizes to build the part of another process. Here layers are made by their axis, and some would hear
# of it and others not; so what is the case may be said, and None ends the pretence, as there.
def _say_again(setter: str, value: int | None, is_so: int) -> None:
    if value not in (None, is_so):
        raise ConfigError(
            f"{setter}({value}): it is {is_so}, and a process cannot pretend to be another; start as many as the layout has, with "
            "--tensor-model-parallel-size and --pipeline-model-parallel-size. Checkpoints load into any layout, so none has to be "
            "pretended for their sake"
        )


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    _say_again("set_tensor_model_parallel_rank", rank, get_mesh()["tp"].rank)


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    _say_again("set_tensor_model_parallel_world_size", world_size, get_mesh()["tp"].size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    _say_again("set_pipeline_model_parallel_rank", rank, get_mesh()["pp"].rank)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    _say_again("set_pipeline_model_parallel_world_size", world_size, get_mesh()["pp"].size)


def set_data_parallel_rank(rank: int | None) -> None:
    _say_again("set_data_parallel_rank", rank, get_mesh()["dp"].rank)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    _say_again("set_expert_model_parallel_rank", rank, get_mesh()["cp"].rank)


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    _say_again("set_expert_model_parallel_world_size", world_size, get_mesh()["cp"].size)


def _is_chunk(wanted: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    """Whether the running chunk (or `vp_stage`) is number `wanted`; always so where ranks hold one chunk."""
    mesh = get_mesh()
    if ignore_virtual or mesh.virtual_size is None:
        return True
    chunk = mesh.virtual_rank if vp_stage is None else vp_stage
    if chunk is None:
        raise RuntimeError("no chunk is running: pass vp_stage, or set_virtual_pipeline_model_parallel_rank first")
    return chunk == wanted % mesh.virtual_size


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank, with its running chunk or `vp_stage`, holds the first stage."""
    return get_mesh()["pp"].is_first and _is_chunk(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Whether this rank, with its running chunk or `vp_stage`, holds the last stage."""
    return get_mesh()["pp"].is_last and _is_chunk(-1, ignore_virtual, vp_stage)


# Context parallelism has one rank so far, so that the data-parallel axis is the same with and without it.
def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    return _group("dp_inner" if partial_data_parallel else "dp")


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    """The data-parallel group over gloo, where that is what the job runs on."""
    group = get_data_parallel_group(with_context_parallel, partial_data_parallel)
    if group is not None and (backend := dist.get_backend(group)) != "gloo":
        raise NotImplementedError(f"there are no gloo groups beside those of {backend}; use get_data_parallel_group()")
    return group


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return get_mesh()["dp_inner" if partial_data_parallel else "dp"].rank


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return get_mesh()["dp_inner" if partial_data_parallel else "dp"].size


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return get_mesh()["dp"].ranks[0]


def get_context_parallel_group() -> Any:
    return _group("cp")


def get_context_parallel_rank() -> int:
    return get_mesh()["cp"].rank


def get_context_parallel_world_size() -> int:
    return get_mesh()["cp"].size


def get_context_parallel_global_ranks() -> list[int]:
    return list(get_mesh()["cp"].ranks)


# Expert parallelism has one rank so far, hence the experts' tensor and data axes are the dense ones. "cp" is an axis of one rank.
def get_expert_model_parallel_group() -> Any:
    return _group("cp")


def get_expert_model_parallel_rank() -> int:
    return get_mesh()["cp"].rank


def get_expert_model_parallel_world_size() -> int:
    return get_mesh()["cp"].size


def get_expert_tensor_parallel_group() -> Any:
    return _group("tp")


def get_expert_tensor_parallel_rank() -> int:
    return get_mesh()["tp"].rank


def get_expert_tensor_parallel_world_size() -> int:
    return get_mesh()["tp"].size


def get_expert_data_parallel_group(partial_expert_data_parallel: bool = False) -> Any:
    return get_data_parallel_group(partial_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    return get_data_parallel_rank(partial_data_parallel=partial_expert_data_parallel)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    return get_data_parallel_world_size(partial_data_parallel=partial_expert_data_parallel)


def get_model_parallel_group() -> Any:
    return _group("mp")


def get_model_parallel_src_rank() -> int:
    return get_mesh()["mp"].ranks[0]


def get_embedding_group() -> Any:
    return _group("embd")


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank's stage (or its running chunk, or `vp_stage`) holds the word table: the first one, and the last for its
    output layer, if a script has not chosen others."""
    mesh = get_mesh()
    ends = first_and_last(mesh["pp"].ranks)
    mine = mesh["pp"].ranks[mesh["pp"].rank]
    if ignore_virtual or mine not in ends:
        return mine in mesh.embedding_ranks
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def get_position_embedding_group() -> Any:
    return _group("pos_embd")


def is_rank_in_position_embedding_group() -> bool:
    mesh = get_mesh()
    return mesh["pp"].ranks[mesh["pp"].rank] in mesh.position_embedding_ranks


def is_initialized() -> bool:
    """An old name of `model_parallel_is_initialized`."""
    return model_parallel_is_initialized()


def is_unitialized() -> bool:
    """Megatron's spelling."""
    return not model_parallel_is_initialized()


class GlobalMemoryBuffer:
    """Tensors that are handed out again under the same name, so that a transient of every layer is allocated once."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Uninitialised; the one handed out under this name before must be done with."""
        numel = torch.Size(tensor_shape).numel()
        kept = self.buffer.get((name, dtype))
        if kept is None or kept.numel() < numel:
            kept = self.buffer[name, dtype] = torch.empty(numel, dtype=dtype, device=get_mesh().device)
        return kept[:numel].view(tuple(tensor_shape))


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    return get_mesh().kept.setdefault("global memory buffer", GlobalMemoryBuffer())


_NOT_BUILT = {
    "get_tensor_and_data_parallel_group": "use the tensor- and data-parallel groups one after the other",
    "get_tensor_and_context_parallel_group": "context parallelism is not built yet; use the tensor-parallel group",
    "get_hierarchical_context_parallel_groups": "context parallelism is not built yet",
    "get_expert_tensor_and_model_parallel_group": "expert parallelism is not built yet; use the tensor-parallel group",
    "get_expert_tensor_model_pipeline_parallel_group": "expert parallelism is not built yet; use the model-parallel group",
    "get_amax_reduction_group": "8-bit numbers are not built yet",
    "get_pipeline_model_parallel_split_rank": "models of an encoder and a decoder are not built yet",
    "is_pipeline_stage_before_split": "models of an encoder and a decoder are not built yet",
    "is_pipeline_stage_after_split": "models of an encoder and a decoder are not built yet",
}

__getattr__ = not_built(__name__, _NOT_BUILT)
