"""The process-group registry (`mpu`): one `Mesh` of named axes, and Megatron's accessors over it, a line each.

    axis          ranks that differ in                      used for
    tp            the part of each layer                    activations inside a layer
    pp            the pipeline stage                        scalars of a step
    pp_forward    the same ranks, own communicators         activations to the next stage,
    pp_backward                                             gradients to the previous one
    dp            the samples: dp_outer x dp_inner          gradients
    kv            the neighbours in tp that share one       the gradient of shared key/value heads
                  key/value head
    mp            tp and pp: one whole model                sums over all parameters
    embd          first and last stage                      the gradient of a tied embedding
    world         anything                                  agreement

`mpu.initialize_model_parallel` is called once by every rank. Code below the composition root never reads the registry: it is
handed the `Axis` objects that it uses.
"""

import datetime
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# Imported later (torch.optim does), its functions would take the job's group as a default value and keep it, and its threads,
# alive after destroy_process_group. Seen in torch 2.13.
import torch.distributed.nn.functional  # noqa: F401

from megatron.core.comm import Group, Ledger, TorchGroup
from megatron.core.config import ConfigError, knob
from megatron.core.grid import Axis, Grid, grid_of

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


class Mesh(Mapping[str, Axis]):
    """Every axis of this rank by name: `mesh["tp"]`. Also the home of the ledger."""

    def __init__(self, axes: dict[str, Axis], ledger: Ledger):
        self._axes, self.ledger = axes, ledger
        self.virtual_size: int | None = None  # model chunks of each pipeline rank, None without interleaving
        self.virtual_rank: int | None = None  # the chunk that is running, for scripts that ask

    def __getitem__(self, name: str) -> Axis:
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def over(self, names: tuple[str, ...]) -> Axis:
        """The one axis that spans several: ("dp_outer", "dp_inner") is "dp"."""
        return self._axes[_SPANS[names]]


# What each axis of the mesh varies in, and which communicator it has: axes with equal ranks share one, except that
# the two directions of the pipeline have their own, since NCCL runs the transfers of one communicator in order.
_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp_outer", "dp_inner"),
    "dp_outer": ("dp_outer",),
    "dp_inner": ("dp_inner",),
    "mp": ("pp", "tp"),
    "world": ("pp", "dp_outer", "dp_inner", "cp", "tp"),
    "pp_forward": ("pp",),
    "pp_backward": ("pp",),
}
_OWN_COMMUNICATOR = ("pp_forward", "pp_backward")
_SPANS = {("dp_outer", "dp_inner"): "dp", ("dp_inner",): "dp_inner", ("dp_outer",): "dp_outer"}

MakeGroup = Callable[[str, tuple[int, ...]], Group]


def build_mesh(grid: Grid, rank: int, make_group: MakeGroup, ranks_per_kv_head: int = 1) -> Mesh:
    """The axes of `rank`. `make_group(axis name, global ranks)` is called in the same order by all members of a group.

    `ranks_per_kv_head`: so many neighbours on "tp" are an axis "kv". With 2 groups on 4 ranks: tp (0,1,2,3), kv (0,1) (2,3).
    """
    if (tensor := grid.sizes["tp"]) % ranks_per_kv_head:
        raise ConfigError(
            f"{ranks_per_kv_head} ranks per key/value head do not divide {tensor} tensor-parallel ranks; "
            "give tensor-parallel size / query groups"
        )
    ledger, axes = Ledger(), {}

    def add(name: str, ranks: tuple[int, ...]) -> None:
        shared = next((a for a in axes.values() if a.ranks == ranks and name not in _OWN_COMMUNICATOR), None)
        group = None if len(ranks) == 1 else shared.group if shared else make_group(name, ranks)
        axes[name] = Axis(name, ranks, ranks.index(rank), group, ledger)

    for name, varying in _AXES.items():
        add(name, next(ranks for ranks in grid.groups(*varying) if rank in ranks))
    stages = axes["pp"].ranks
    ends = tuple(dict.fromkeys((stages[0], stages[-1])))
    add("embd", ends if rank in ends else (rank,))
    first = axes["tp"].rank // ranks_per_kv_head * ranks_per_kv_head
    add("kv", axes["tp"].ranks[first : first + ranks_per_kv_head])
    return Mesh(axes, ledger)


# ---------------------------------------------------------------- joining the other processes

_joined = False  # whether start_distributed has initialised torch.distributed, and not the caller


def start_distributed(backend: str, timeout_minutes: int) -> None:
    """Join the job: adopt torch.distributed if the caller has initialised it, else read the launcher's variables.

    A process that no launcher started is a job of one, and needs no torch.distributed at all.
    """
    global _joined
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is set but {', '.join(missing)} is not; start with torchrun, or unset WORLD_SIZE"
        )
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=timeout_minutes))
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
    destroy_model_parallel()
    if _joined:
        gc.collect()  # graphs of the last step hold axes in circles
        dist.destroy_process_group()
        _joined = False


def job_store() -> dist.Store | None:
    """Where the processes of a job left word for one another when they met, and may again; None for a job of one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def world_axis() -> Axis:
    """All ranks of the job, before there is a mesh: for agreeing on how to make one."""
    ranks = tuple(range(launched_world_size()))
    group = TorchGroup(dist.group.WORLD) if dist.is_initialized() and len(ranks) > 1 else None
    return Axis("world", ranks, launched_rank(), group, Ledger())


def launched_rank() -> int:
    """The global rank of this process, before or after the job is joined."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def launched_local_rank() -> int:
    """The rank within this node: it picks the device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


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
    num_distributed_optimizer_instances: int = 1,
    ranks_per_kv_head: int = 1,
    distributed_timeout_minutes: int = 30,
    order: str = ORDER,
) -> Mesh:
    """Create the groups of this job. Every rank must call, once, after torch.distributed is initialised (or without it,
    as a job of one rank).

    16 ranks with tensor size 2 and pipeline size 4 (hence data-parallel size 2), in the default order:
        tp   [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]
        dp   [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]
        pp   [0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]
    Neighbouring ranks share a node, so the chattiest axis varies fastest.
    """
    global _mesh
    if _mesh is not None:
        raise RuntimeError("model parallelism is initialised already; call destroy_model_parallel() first")
    built = {"context": context_parallel_size, "expert": expert_model_parallel_size}
    if unbuilt := [f"{name} parallelism of size {size}" for name, size in built.items() if size != 1]:
        raise ConfigError(f"{' and '.join(unbuilt)}: not built yet; use 1")
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

    _mesh = build_mesh(grid, launched_rank(), make_group, ranks_per_kv_head)
    _mesh.virtual_size = virtual_pipeline_model_parallel_size
    return _mesh


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
    group = get_mesh()[name].group
    return group.process_group if isinstance(group, TorchGroup) else group


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


def get_data_parallel_group() -> Any:
    return _group("dp")


def get_data_parallel_rank() -> int:
    return get_mesh()["dp"].rank


def get_data_parallel_world_size() -> int:
    return get_mesh()["dp"].size


def get_data_parallel_src_rank() -> int:
    return get_mesh()["dp"].ranks[0]


def get_context_parallel_group() -> Any:
    return _group("cp")


def get_context_parallel_rank() -> int:
    return get_mesh()["cp"].rank


def get_context_parallel_world_size() -> int:
    return get_mesh()["cp"].size


def get_expert_model_parallel_rank() -> int:
    return 0


def get_expert_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_group() -> Any:
    return _group("mp")


def get_embedding_group() -> Any:
    return _group("embd")


def is_rank_in_embedding_group() -> bool:
    """Whether this rank's stage holds the word embedding: the first stage does, and the last one's output layer."""
    pp = get_mesh()["pp"]
    return pp.is_first or pp.is_last
