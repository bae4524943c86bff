"""Save and load a run: parameters and optimizer state as boxes of tensors, everything else as JSON.

    model/<parameter>                       in the model's precision
    optimizer/exp_avg/<parameter>           Adam's moments, float32
    optimizer/exp_avg_sq/<parameter>
    optimizer/momentum_buffer/<parameter>   SGD's moment
    optimizer/master/<parameter>            float32 masters of half-precision parameters

No generator state is saved: random numbers follow from the seed and the position in the run.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.base.registry import FUNCTIONS
from megatron.core.dist_checkpointing import Checkpoint, LocalTensor, save_checkpoint as write_checkpoint
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.lost_buffers import BUFFERS_AT_START, LOST_BUFFERS, lost_buffers
from megatron.core.dist_checkpointing.retention import delete_older
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.ops import cpu_half_precision_matmul as matmul, dropout_masks
from megatron.core.optimizer.checkpoint_tensors import sharded_model_state, sharded_optimizer_state
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.sharding.boxes import size_of
from megatron.core.storage.paths import path_of
from megatron.training.arguments.checkpoint_to_load import Start, loads_what_it_saves, where_to_start
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing import compatibility, non_persistent_checkpoint, tokenizer_compatibility
from megatron.training.checkpointing.hf_origin import origin_of_new_run, origin_of_run
from megatron.training.checkpointing.load_with_fallback import load_undamaged, newest_readable
from megatron.training.checkpointing.model_name import model_name
from megatron.training.checkpointing.non_persistent_checkpoint import OwnPart
from megatron.training.checkpointing.registry_compatibility import functions_of
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.checkpointing.unsaved_buffers import (
    changed_buffers,
    check_lost_buffers,
    first_buffers,
    note_other_buffers,
)
from megatron.training.global_vars import Runtime, print_rank_0

Chunks = Sequence[DistributedDataParallel]

_MASTER = "optimizer/master/"


def count_parameters(chunks: Chunks, mesh: Mesh, device: torch.device | str) -> int:
    """Parameters of the whole model, each counted once. One all-reduce of a scalar; every rank must call."""
    written = (tensor for tensor in sharded_model_state(chunks, mesh).values() if tensor.is_writer)
    mine = sum(math.prod(size_of(box)) for tensor in written for box, _ in tensor.pieces)
    return int(collectives.all_reduce(torch.tensor([mine], dtype=torch.int64, device=device), mesh["world"]).item())


def save(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, state: TrainState, log_state: dict[str, Any]
) -> None:
    """Write a checkpoint of this step. Every rank must call. log_state: only the logging rank's is saved."""
    root, device = runtime.config.checkpoint.save, runtime.device.torch_device
    saving = to_save(runtime, chunks, optimizer, state, log_state)
    warn = lambda problem: print_rank_0(f"WARNING: {problem}")  # noqa: E731
    write_checkpoint(path_of(root), state.iteration, *saving, runtime.mesh["world"], device, warn=warn)
    print_rank_0(f"saved checkpoint at iteration {state.iteration} to {root}")


def tensors_to_save(runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer) -> dict[str, LocalTensor]:
    """This rank's part of each tensor of a checkpoint."""
    state = sharded_optimizer_state(optimizer, runtime.mesh) if runtime.config.checkpoint.save_optim else {}
    return sharded_model_state(chunks, runtime.mesh) | state


def to_save(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, state: TrainState, log_state: dict[str, Any]
) -> tuple[dict[str, LocalTensor], dict[str, Any]]:
    """(tensors, state) of a checkpoint of this step. Every rank must call."""
    mesh, device = runtime.mesh, runtime.device.torch_device
    for chunk in chunks:
        chunk.finish_param_gather()
    world = mesh["world"]
    name = model_name([chunk.module for chunk in chunks], mesh["pp"], device)
    log_text = collectives.broadcast_text(json.dumps(log_state), world, device, source=mesh.reporter())
    lost = changed_buffers(chunks, world, device)
    begun = first_buffers(chunks, world, device)
    return (
        tensors_to_save(runtime, chunks, optimizer),
        {
            "train": state.as_json(),
            "checkpoints": state.checkpoints,
            **({} if state.origin is None else {"origin": state.origin.as_json()}),
            "log": json.loads(log_text),
            "global_batch_size": runtime.global_batch_size,
            "optimizer_steps": optimizer.step_count,
            "grad_scaler": {} if optimizer.scaler is None else optimizer.scaler.state(),
            "model": name,
            "vocab_size": runtime.vocab_size_if_any,
            "tokenizer_sha256": runtime.tokenizer_sha256,
            "data_sha256": runtime.data_sha256,
            "dropout_masks": dropout_masks.MASKS_VERSION,
            "config": runtime.config.as_json(),
            FUNCTIONS: functions_of(runtime.config),
            **_products_of(runtime),
            **({LOST_BUFFERS: lost} if lost else {}),
            **({BUFFERS_AT_START: begun} if begun else {}),
        },
    )


def note_saved(runtime: Runtime, state: TrainState, iteration: int) -> None:
    """Write down that this run has saved `iteration`, and delete those of its checkpoints that --keep-checkpoints does
    not keep.
    Every rank calls."""
    state.checkpoints = sorted({*state.checkpoints, iteration})
    if runtime.mesh["world"].is_first:
        _delete_older(runtime.config.checkpoint, state)


def _delete_older(config: CheckpointConfig, state: TrainState) -> None:
    """Delete this run's checkpoints that --keep-checkpoints does not keep, now that a newer one is on disk."""
    if config.kept is None:
        return
    spared = () if config.ckpt_step is None else (config.ckpt_step,)
    found = delete_older(path_of(config.save), state.checkpoints, config.kept, config.save_retain_interval, spared)
    deleted, problems = found
    state.checkpoints = [number for number in state.checkpoints if number not in deleted]
    for problem in problems:
        print_rank_0(f"WARNING: {problem}")


def _products_of(runtime: Runtime) -> dict[str, Any]:
    dtype = runtime.config.transformer.params_dtype
    has_two = matmul.is_half_precision_on_cpu(dtype, runtime.device.torch_device)
    return {"products": matmul.modes_as_json(runtime.matmul_modes, dtype)} if has_two else {}


def saved_products(config: CheckpointConfig, world: Axis, device: torch.device) -> dict[str, Any] | None:
    """The checkpoint's record of how half-precision products are computed; None if there is none, or it is unreadable
    (`load`
    reports that). Every rank must call."""
    found = None
    if world.is_first:
        with contextlib.suppress(ValueError, OSError):
            start = where_to_start(config)
            if start is not None and not start.weights_only:
                found = newest_readable(start).state.get("products")
            if (state := non_persistent_checkpoint.state_of_copy(config, _newest(start))) is not None:
                found = state.get("products")
    return json.loads(collectives.broadcast_text(json.dumps(found), world, device))


def choose_start(config: CheckpointConfig, world: Axis, device: torch.device) -> Start | None:
    """`where_to_start`, decided by the first rank for all. Every rank must call."""
    with collectives.raise_together(world, device):
        chosen = json.dumps(where_to_start(config)) if world.is_first else None
    chosen = json.loads(collectives.broadcast_text(chosen, world, device))
    return None if chosen is None else Start(*chosen)


def load(runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer) -> tuple[TrainState, dict[str, Any] | None]:
    """Fill parameters and optimizer from --load; returns (train state, log state). Every rank must call.

    The checkpoint may come from any layout. Without a checkpoint in --load the run starts from --pretrained-checkpoint,
    or from
    initial weights, with a note.
    """
    config, mesh = runtime.config.checkpoint, runtime.mesh
    device = runtime.device.torch_device
    if config.load is None and config.pretrained_checkpoint is None:
        return TrainState(origin=origin_of_new_run(runtime)), None
    chosen = choose_start(config, mesh["world"], device)
    if (loaded := _load_copy(runtime, chunks, optimizer, chosen)) is not None:
        return loaded
    if chosen is None:
        print_rank_0(f"no checkpoint in {config.load}: starting from initial weights")
        return TrainState(origin=origin_of_new_run(runtime)), None
    if chosen.warning:
        print_rank_0(f"WARNING: {chosen.warning}")

    def load_one(checkpoint: Checkpoint) -> tuple[TrainState, dict[str, Any] | None]:
        with compatibility.naming(f"{chosen.flag} {chosen.root}"):
            return _load_one(runtime, chunks, optimizer, checkpoint, chosen)

    owns_root = config.load is not None and loads_what_it_saves(config)
    return load_undamaged(chosen, load_one, mesh["world"], device, owns_root=owns_root)


def _load_copy(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, chosen: Start | None
) -> tuple[TrainState, dict[str, Any] | None] | None:
    """`load` of the copy for restarts that is newer than the checkpoint to start from; None if there is none, or any
    rank's part
    cannot be used."""
    config, device = runtime.config.checkpoint, runtime.device.torch_device
    world = runtime.mesh["world"]
    copy = non_persistent_checkpoint.newest_copy(config, _newest(chosen), world, device)
    if copy is None:
        return None
    instead = "initial weights" if chosen is None else f"the checkpoint of iteration {chosen.iterations[0]}"
    place = non_persistent_checkpoint.place_of(config, world.rank)
    start = Start("the copy in", str(place), False, [copy.iteration])
    checkpoint = loaded = None
    with non_persistent_checkpoint.without_copy(copy, instead, world, device):
        checkpoint = non_persistent_checkpoint.open_copy(config, copy, world, device)
    if checkpoint is None:
        return None
    refused = compatibility.naming(f"{start.flag} {start.root}")
    with non_persistent_checkpoint.without_copy(copy, instead, world, device, may_end=chosen is not None), refused:
        loaded = _load_one(runtime, chunks, optimizer, checkpoint, start)
    return loaded


def _newest(chosen: Start | None) -> int | None:
    return chosen.iterations[0] if chosen is not None and chosen.iterations else None


def _load_one(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, checkpoint: Checkpoint | OwnPart, chosen: Start
) -> tuple[TrainState, dict[str, Any] | None]:
    """`load` of one checkpoint, which may turn out to be damaged."""
    config, mesh = runtime.config.checkpoint, runtime.mesh
    device, root = runtime.device.torch_device, chosen.root
    finetune, given = chosen.weights_only, f"{chosen.flag} {root}"
    if checkpoint.warning:
        print_rank_0(f"WARNING: {checkpoint.warning}")
    compatibility.check_state(checkpoint.state, checkpoint.iteration, given)
    name = model_name([chunk.module for chunk in chunks], mesh["pp"], device)
    goes_on = config.load_optim and not finetune
    resizes = config.resize_token_embeddings is not None and not goes_on and isinstance(checkpoint, Checkpoint)
    compatibility.check_same_model(runtime, checkpoint.state, name, given, goes_on=not finetune, resizes=resizes)
    check_lost_buffers(lost_buffers(checkpoint.state), given, allowed=config.allow_lost_buffers)
    note_other_buffers(checkpoint.state.get(BUFFERS_AT_START, {}), first_buffers(chunks, mesh["world"], device), given)
    is_other = tokenizer_compatibility.check_same_tokens(runtime, checkpoint.state, given)
    wanted = sharded_model_state(chunks, mesh)
    if isinstance(checkpoint, Checkpoint):  # a part of a copy names the boxes of its pieces, which must be those wanted
        compatibility.check_same_parameters(wanted, checkpoint, mesh["world"], device)
        compatibility.check_same_positions(runtime.config, wanted, checkpoint, mesh["world"], device)
    absent: set[str] = set()
    if isinstance(checkpoint, Checkpoint):
        absent = compatibility.absent_parameters(
            runtime.config, wanted, checkpoint, given, mesh["world"], device, goes_on=goes_on
        )
    if goes_on:
        compatibility.check_same_optimizer(runtime, checkpoint.state)
    state = sharded_optimizer_state(optimizer, mesh)
    if absent:  # their masters, too, were made of first values
        wanted = {name: tensor for name, tensor in wanted.items() if name not in absent}
        state = {name: tensor for name, tensor in state.items() if name.replace(_MASTER, "model/", 1) not in absent}
    if resizes:
        rows = tokenizer_compatibility.rows_that_stay(runtime, checkpoint, given)
        wanted = tokenizer_compatibility.with_rows(wanted, rows, checkpoint)
        state = tokenizer_compatibility.with_rows(state, rows, checkpoint, _MASTER)
    read_tensors(checkpoint, wanted, state, mesh["world"], device, goes_on=goes_on)
    if optimizer.config.reuse_fp32_param:  # this rank has rounded only its own masters to weights; gather the others
        for chunk in chunks:
            chunk.gather_params()
            chunk.finish_param_gather()
    if goes_on:
        optimizer.step_count = checkpoint.state["optimizer_steps"]
        if optimizer.scaler is not None:
            optimizer.scaler.load_state(checkpoint.state.get("grad_scaler", {}))
    print_rank_0(f"loaded {'checkpoint' if goes_on else 'weights'} of iteration {checkpoint.iteration} from {root}")
    compatibility.note_changes(runtime, checkpoint.state, goes_on=not finetune)
    origin = origin_of_run(runtime, checkpoint, given, is_other_tokenizer=is_other or resizes)
    if finetune:
        return TrainState(origin=origin), None
    train = TrainState.from_json(checkpoint.state["train"])
    before = [*checkpoint.state.get("checkpoints", ()), train.iteration] if loads_what_it_saves(config) else []
    train.checkpoints = sorted(set(before) & set(saved_iterations(path_of(config.load)))) if before else []
    train.origin = origin
    return train, checkpoint.state["log"]


def read_tensors(
    checkpoint: Checkpoint | OwnPart,
    model: dict[str, LocalTensor],
    state: dict[str, LocalTensor],
    world: Axis,
    device: torch.device | str,
    *,
    goes_on: bool,
) -> None:
    """Fill the parameters and, if `goes_on`, the optimizer state. Masters not in the checkpoint are filled from the weights.
    Every rank must call."""
    masters = {name: tensor for name, tensor in state.items() if name.startswith(_MASTER)}
    # Asked of all ranks: a rank's part of a local copy has no master if the rank owns no element, and the ranks must
    # read alike.
    has_masters = any(name.startswith(_MASTER) for name in checkpoint.names)
    saves_masters = bool(
        collectives.all_reduce(torch.tensor([has_masters], dtype=torch.int32, device=device), world, "max").item()
    )
    if goes_on and saves_masters and not masters:  # resumed in full precision: the masters become the weights
        names = {name: name.replace("model/", _MASTER, 1) for name in model}
        # What was not trained has no master.
        model = {names[name] if names[name] in checkpoint.names else name: tensor for name, tensor in model.items()}
    wanted = [model]
    if goes_on:  # after the parameters: with --reuse-fp32-param masters share memory with weights
        wanted.append(state if saves_masters else {n: x for n, x in state.items() if n not in masters})
    if not (goes_on and saves_masters):  # from the saved weights, which may be wider than this run's parameters
        wanted.append({name.replace(_MASTER, "model/", 1): tensor for name, tensor in masters.items()})
    for tensors in wanted:
        checkpoint.read_into(tensors, world, convert=True, device=device)
