"""Saving and loading a run: parameters and optimizer state as boxes of tensors, everything else as JSON.

    model/<parameter>                       in the model's precision
    buffer/<buffer>                         persistent buffers of modules, in their own
    optimizer/exp_avg/<parameter>           Adam's moments, float32
    optimizer/exp_avg_sq/<parameter>
    optimizer/momentum_buffer/<parameter>   SGD's moment
    optimizer/master/<parameter>            float32 masters of half-precision parameters

No generator state is saved: random numbers follow from the seed and the position in the run.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.convert import is_foreign, open_foreign
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.registry_with_checked_entries import FUNCTIONS
from megatron.core.dist_checkpointing import (
    Checkpoint,
    CheckpointError,
    LocalTensor,
    save_checkpoint as write_checkpoint,
)
from megatron.core.dist_checkpointing.checkpoint_folder import saved_iterations
from megatron.core.dist_checkpointing.retention import delete_older
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import BUFFERS, FROZEN, LOST_BUFFERS
from megatron.core.distributed.data_parallel import DistributedDataParallel
from megatron.core.ops import cpu_half_precision_matmul as matmul, dropout_masks
from megatron.core.optimizer.flat_optimizer import FlatOptimizer
from megatron.core.optimizer.sharded_model_and_optimizer_state import sharded_model_state, sharded_optimizer_state
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import Axis
from megatron.core.peft.lora import adapter_names
from megatron.core.sharding.boxes import size_of
from megatron.core.storage.path_or_url import path_of
from megatron.training.arguments.choose_checkpoint_to_resume import Start, loads_what_it_saves, where_to_start
from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpointing import (
    check_same_model_and_optimizer,
    non_persistent_checkpoint,
    tokenizer_check_and_embedding_resize,
)
from megatron.training.checkpointing.compare_registry_functions_on_resume import functions_of
from megatron.training.checkpointing.frozen_weights import frozen_names, frozen_state, load_base
from megatron.training.checkpointing.hf_origin import provenance_of_new_run, provenance_of_run
from megatron.training.checkpointing.init_adapters_from_base_weights import initialize_from_weights
from megatron.training.checkpointing.load_with_fallback import load_undamaged, newest_with_good_manifest
from megatron.training.checkpointing.model_class_and_custom_modules import model_name
from megatron.training.checkpointing.module_buffers import (
    buffers_to_save,
    changed_extra_states,
    load_buffers,
    warn_of_lost_buffers,
)
from megatron.training.checkpointing.non_persistent_checkpoint import RankCheckpoint
from megatron.training.checkpointing.train_state_counters import TrainState
from megatron.training.global_vars import Runtime, print_rank_0

Chunks = Sequence[DistributedDataParallel]
Loaded = tuple[TrainState, dict[str, Any] | None]  # the position of the run, and the state of its log

_MODEL = "model/"
_MASTER = "optimizer/master/"


class ParameterCounts(NamedTuple):
    """Numbers of elements of a model's parameters, each parameter counted once."""

    total: int
    trainable: int  # of those that require gradients, such as LoRA's adapters


def count_parameters(chunks: Chunks, mesh: Mesh, device: torch.device | str) -> ParameterCounts:
    """Count the parameters of the whole model. One all-reduce of two numbers; every rank must call."""
    trainable = {f"model/{name}" for chunk in chunks for name, x in chunk.module.named_parameters() if x.requires_grad}
    own = ParameterCounts(0, 0)
    for name, tensor in sharded_model_state(chunks, mesh).items():
        if tensor.is_writer:
            elements = sum(math.prod(size_of(global_box)) for global_box, _ in tensor.pieces)
            own = ParameterCounts(own.total + elements, own.trainable + elements * (name in trainable))
    sums = collectives.all_reduce(torch.tensor(own, dtype=torch.int64, device=device), mesh["world"])
    return ParameterCounts(*sums.tolist())


# ---------------------------------------------------------------- saving


def save(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, state: TrainState, log_state: dict[str, Any]
) -> None:
    """Write a checkpoint of this step. Every rank must call. log_state: only the logging rank's is saved."""
    root = runtime.config.checkpoint.save
    tensors, json_state = checkpoint_contents(runtime, chunks, optimizer, state, log_state)
    write_checkpoint(
        path_of(root),
        state.iteration,
        tensors,
        json_state,
        runtime.mesh["world"],
        runtime.device.torch_device,
        warn=lambda problem: print_rank_0(f"WARNING: {problem}"),
    )
    print_rank_0(f"saved checkpoint at iteration {state.iteration} to {root}")


def tensors_to_save(runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer) -> dict[str, LocalTensor]:
    """Return this rank's part of each tensor of a checkpoint, by name. Every rank must call.

    Each is [shape on this rank], or flat, [elements], where it is sharded.
    """
    return _tensors_and_buffer_records(runtime, chunks, optimizer)[0]


def _tensors_and_buffer_records(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer
) -> tuple[dict[str, LocalTensor], dict[str, list[Any]]]:
    """Return `tensors_to_save`, and [dtype, shape] of all ranks' buffers by name."""
    mesh = runtime.mesh
    buffers, records = buffers_to_save(chunks, mesh, runtime.device.torch_device)
    optimizer_state = {}
    if runtime.config.checkpoint.save_optim:
        optimizer_state = sharded_optimizer_state(optimizer, mesh)
    model = sharded_model_state(chunks, mesh)
    if not runtime.config.checkpoint.save_frozen:
        left_out = frozen_names(chunks)
        model = {name: tensor for name, tensor in model.items() if name not in left_out}
    return model | buffers | optimizer_state, records


def checkpoint_contents(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, state: TrainState, log_state: dict[str, Any]
) -> tuple[dict[str, LocalTensor], dict[str, Any]]:
    """Return (tensors, JSON state) of a checkpoint of this step. Every rank must call.

    Tensors are as of `tensors_to_save`.
    """
    mesh = runtime.mesh
    world = mesh["world"]
    device = runtime.device.torch_device
    for chunk in chunks:
        chunk.finish_param_gather()

    # what the ranks must agree on
    name = model_name([chunk.module for chunk in chunks], mesh["pp"], device)
    log_text = collectives.broadcast_text(json.dumps(log_state), world, device, source=mesh.reporter())
    lost = changed_extra_states(chunks, world, device)
    tensors, buffers = _tensors_and_buffer_records(runtime, chunks, optimizer)
    frozen = None if runtime.config.checkpoint.save_frozen else frozen_state(chunks, mesh, device)

    # everything that is no collective; the manifest lists the keys in this order
    json_state: dict[str, Any] = {"train": state.as_json(), "checkpoints": state.checkpoints}
    if state.origin is not None:
        json_state["origin"] = state.origin.as_json()
    json_state["log"] = json.loads(log_text)
    json_state["global_batch_size"] = runtime.global_batch_size
    json_state["optimizer_steps"] = optimizer.step_count
    json_state["grad_scaler"] = {} if optimizer.scaler is None else optimizer.scaler.state()
    json_state["model"] = name
    json_state["vocab_size"] = runtime.vocab_size_if_any
    json_state["tokenizer_sha256"] = runtime.tokenizer_sha256
    json_state["data_sha256"] = runtime.data_sha256
    json_state["dropout_masks"] = dropout_masks.MASKS_VERSION
    json_state["config"] = runtime.config.as_json()
    json_state[FUNCTIONS] = functions_of(runtime.config)
    dtype = runtime.config.transformer.params_dtype
    if matmul.is_half_precision_on_cpu(dtype, runtime.device.torch_device):
        json_state["products"] = matmul.modes_as_json(runtime.matmul_modes, dtype)
    json_state[BUFFERS] = buffers
    if lost:
        json_state[LOST_BUFFERS] = lost
    if frozen is not None and frozen["elements"]:
        json_state[FROZEN] = frozen
    return tensors, json_state


def record_save(runtime: Runtime, state: TrainState, iteration: int) -> None:
    """Record that this run has saved `iteration`; delete its older checkpoints as --keep-checkpoints says.

    Every rank must call.
    """
    state.checkpoints = sorted({*state.checkpoints, iteration})
    config = runtime.config.checkpoint
    if config.kept is None or not runtime.mesh["world"].is_first:
        return
    spared = () if config.ckpt_step is None else (config.ckpt_step,)
    deleted, problems = delete_older(
        path_of(config.save), state.checkpoints, config.kept, config.save_retain_interval, spared
    )
    state.checkpoints = [number for number in state.checkpoints if number not in deleted]
    for problem in problems:
        print_rank_0(f"WARNING: {problem}")


# ---------------------------------------------------------------- what to load


def load_saved_matmul_modes(config: CheckpointConfig, world: Axis, device: torch.device) -> dict[str, Any] | None:
    """Return the checkpoint's record of how half-precision products are computed; every rank must call.

    None if there is no record, or if the checkpoint cannot be read, which `load` reports.
    """
    modes = None
    if world.is_first:
        with contextlib.suppress(ValueError, OSError):
            start = where_to_start(config)
            if start is not None and not start.weights_only:
                modes = newest_with_good_manifest(start).state.get("products")
            local_state = non_persistent_checkpoint.local_checkpoint_common_state(config, _newest_iteration(start))
            if local_state is not None:
                modes = local_state.get("products")
    return json.loads(collectives.broadcast_text(json.dumps(modes), world, device))


def agree_where_to_start(config: CheckpointConfig, world: Axis, device: torch.device) -> Start | None:
    """Return `where_to_start`, which the first rank decides for all. Every rank must call."""
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            text = json.dumps(where_to_start(config))
    start = json.loads(collectives.broadcast_text(text, world, device))
    return None if start is None else Start(*start)


def refuse_other_settings(runtime: Runtime, start: Start | None) -> None:
    """Refuse a checkpoint whose model has other settings than this run's, by its manifest alone. Every rank must call.

    It is asked before the model is built; `load` asks again, with the model. A folder of another project has set the
    flags that are not given, and others may contradict it. Such a folder, and a checkpoint that was converted from one, is
    also refused if tensors are missing. A checkpoint of ours that cannot be read is told by `load`, which may take an
    older one. Raises ConfigError.
    """
    config = runtime.config.checkpoint
    world = runtime.mesh["world"]
    with collectives.raise_together(world, runtime.device.torch_device):
        if world.is_first and start is not None:
            of_other_project = is_foreign(start.root, _newest_iteration(start))
            source = f"{start.flag} {start.root}"
            told_by_load = OSError if of_other_project else (CheckpointError, OSError)
            resumes = not start.weights_only
            checkpoint = None
            try:
                with contextlib.suppress(told_by_load), check_same_model_and_optimizer.naming_source(source):
                    if of_other_project:
                        checkpoint = open_foreign(start.root, iteration=_newest_iteration(start))
                    else:
                        checkpoint = newest_with_good_manifest(start)
                    check_same_model_and_optimizer.check_state(checkpoint.state, checkpoint.iteration, source)
                    resizes = config.resize_token_embeddings is not None and not (config.load_optim and resumes)
                    problems = check_same_model_and_optimizer.problems_of_settings(
                        runtime, checkpoint.state, source, resumes=resumes, resizes=resizes, are_taken=of_other_project
                    )
                    if problems:
                        raise ConfigError(problems)
                if checkpoint is not None:
                    load_optimizer = config.load_optim and resumes
                    check_same_model_and_optimizer.refuse_lacking_import(
                        runtime.config, checkpoint, load_optimizer=load_optimizer, is_folder=of_other_project
                    )
            except CheckpointError as error:
                raise ConfigError(error.problems) from None


def _newest_iteration(start: Start | None) -> int | None:
    if start is None or not start.iterations:
        return None
    return start.iterations[0]


# ---------------------------------------------------------------- loading


def load(runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer) -> Loaded:
    """Fill parameters and optimizer from --load; return (train state, log state). Every rank must call.

    The checkpoint may come from any layout. The first of these is loaded: a copy for restarts that is newer than
    the checkpoint in --load; that checkpoint; --pretrained-checkpoint. Otherwise the run starts from initial
    weights, with a note.
    """
    config = runtime.config.checkpoint
    world = runtime.mesh["world"]
    device = runtime.device.torch_device
    if config.load is None and config.pretrained_checkpoint is None:
        initialize_from_weights(runtime, chunks, optimizer)
        return TrainState(origin=provenance_of_new_run(runtime)), None

    # a newer copy for restarts
    start = agree_where_to_start(config, world, device)
    loaded = _load_local_checkpoint(runtime, chunks, optimizer, start)
    if loaded is not None:
        return loaded

    # initial weights
    if start is None:
        print_rank_0(f"no checkpoint in {config.load}: starting from initial weights")
        initialize_from_weights(runtime, chunks, optimizer)
        return TrainState(origin=provenance_of_new_run(runtime)), None

    # a checkpoint, or an older one if it is damaged
    if start.warning:
        print_rank_0(f"WARNING: {start.warning}")

    def load_one(checkpoint: Checkpoint) -> Loaded:
        with check_same_model_and_optimizer.naming_source(f"{start.flag} {start.root}"):
            return _load_checkpoint(runtime, chunks, optimizer, checkpoint, start)

    owns_root = config.load is not None and loads_what_it_saves(config)
    return load_undamaged(start, load_one, world, device, owns_root=owns_root)


def _load_local_checkpoint(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, start: Start | None
) -> Loaded | None:
    """Load the copy for restarts if it is newer than the checkpoint to start from.

    None if there is no such copy, or if any rank's part of it cannot be used.
    """
    config = runtime.config.checkpoint
    world = runtime.mesh["world"]
    device = runtime.device.torch_device
    pointer = non_persistent_checkpoint.local_checkpoint_to_resume(config, _newest_iteration(start), world, device)
    if pointer is None:
        return None
    instead = "initial weights" if start is None else f"the checkpoint of iteration {start.iterations[0]}"
    folder = non_persistent_checkpoint.slots_folder(config, world.rank)
    local_start = Start("the copy in", str(folder), False, [pointer.iteration])

    # open it: if that fails on any rank, nothing has been filled yet, and the run starts from the checkpoint
    checkpoint = None
    with non_persistent_checkpoint.falling_back(pointer, instead, world, device):
        checkpoint = non_persistent_checkpoint.open_non_persistent_checkpoint(config, pointer, world, device)
    if checkpoint is None:
        return None

    # load it: if that fails, only a checkpoint could fill the tensors again
    loaded = None
    source = f"{local_start.flag} {local_start.root}"
    with (
        non_persistent_checkpoint.falling_back(pointer, instead, world, device, can_fall_back=start is not None),
        check_same_model_and_optimizer.naming_source(source),
    ):
        loaded = _load_checkpoint(runtime, chunks, optimizer, checkpoint, local_start)
    return loaded


def _load_checkpoint(
    runtime: Runtime, chunks: Chunks, optimizer: FlatOptimizer, checkpoint: Checkpoint | RankCheckpoint, start: Start
) -> Loaded:
    """Check and load one checkpoint, which may turn out to be damaged. Every rank must call."""
    config = runtime.config.checkpoint
    mesh = runtime.mesh
    world = mesh["world"]
    device = runtime.device.torch_device
    source = f"{start.flag} {start.root}"
    resumes = not start.weights_only
    load_optimizer = config.load_optim and resumes
    is_global = isinstance(checkpoint, Checkpoint)  # else one rank's part of a local copy, for this layout alone
    resizes = config.resize_token_embeddings is not None and not load_optimizer and is_global
    if checkpoint.warning:
        print_rank_0(f"WARNING: {checkpoint.warning}")

    # refuse another model, another tokenizer
    check_same_model_and_optimizer.check_state(checkpoint.state, checkpoint.iteration, source)
    modules = [chunk.module for chunk in chunks]
    names = [model_name(modules, mesh["pp"], device)]
    if not resumes:  # weights of a base that has no adapters yet
        names.append(model_name(modules, mesh["pp"], device, of_base=True))
    check_same_model_and_optimizer.check_same_model(
        runtime, checkpoint.state, names, source, resumes=resumes, resizes=resizes
    )
    warn_of_lost_buffers(checkpoint.state, source)
    is_other_tokenizer = tokenizer_check_and_embedding_resize.is_allowed_tokenizer_change(
        runtime, checkpoint.state, source
    )

    # refuse other parameters and other optimizer state
    parameters = sharded_model_state(chunks, mesh)
    if FROZEN in checkpoint.state:
        load_base(chunks, parameters, config, checkpoint.state[FROZEN], source, mesh, device)
        of_base = frozen_names(chunks)
        parameters = {name: tensor for name, tensor in parameters.items() if name not in of_base}
    absent: set[str] = set()
    if is_global:  # a rank's part names the boxes of its pieces, and reading it fails unless they are those wanted
        checkpoint = check_same_model_and_optimizer.with_current_names(parameters, checkpoint, world, device)
        check_same_model_and_optimizer.refuse_unexpected_parameters(
            runtime.config, parameters, checkpoint, world, device
        )
        check_same_model_and_optimizer.check_position_table_rows(runtime.config, parameters, checkpoint, world, device)
        adapters = {f"{_MODEL}{name}" for module in modules for name in adapter_names(module)}
        absent = check_same_model_and_optimizer.absent_parameters(
            runtime.config,
            parameters,
            checkpoint,
            source,
            world,
            device,
            load_optimizer=load_optimizer,
            adapters=adapters,
        )
    if load_optimizer:
        check_same_model_and_optimizer.check_same_optimizer(runtime, checkpoint.state)

    # leave out parameters that keep their initial values; their masters have been made of these values
    optimizer_state = sharded_optimizer_state(optimizer, mesh)
    if absent:
        parameters = {name: tensor for name, tensor in parameters.items() if name not in absent}
        optimizer_state = {
            name: tensor for name, tensor in optimizer_state.items() if _parameter_of(name) not in absent
        }
    if resizes:
        rows = tokenizer_check_and_embedding_resize.reused_rows(runtime, checkpoint, source)
        parameters = tokenizer_check_and_embedding_resize.with_reused_rows_only(parameters, rows, checkpoint)
        optimizer_state = tokenizer_check_and_embedding_resize.with_reused_rows_only(
            optimizer_state, rows, checkpoint, _MASTER
        )

    # read
    begin = check_same_model_and_optimizer.buffers_that_begin(runtime, checkpoint.state)
    load_buffers(chunks, mesh, checkpoint, source, device, begin=begin)
    read_tensors(checkpoint, parameters, optimizer_state, world, device, load_optimizer=load_optimizer)
    if optimizer.config.reuse_fp32_param:  # this rank has rounded only its own masters to weights; gather the others
        for chunk in chunks:
            chunk.gather_params()
            chunk.finish_param_gather()
    if load_optimizer:
        optimizer.step_count = checkpoint.state["optimizer_steps"]
        if optimizer.scaler is not None:
            optimizer.scaler.load_state(checkpoint.state.get("grad_scaler", {}))
    if absent:
        initialize_from_weights(runtime, chunks, optimizer, {name.removeprefix(_MODEL) for name in absent})
    what = "checkpoint" if load_optimizer else "weights"
    print_rank_0(f"loaded {what} of iteration {checkpoint.iteration} from {start.root}")
    check_same_model_and_optimizer.print_changed_settings(runtime, checkpoint.state, resumes=resumes)

    # the position of the run
    origin = provenance_of_run(runtime, checkpoint, source, is_other_tokenizer=is_other_tokenizer or resizes)
    if not resumes:
        return TrainState(origin=origin), None
    train = TrainState.from_json(checkpoint.state["train"])
    train.origin = origin
    train.checkpoints = []
    if loads_what_it_saves(config):
        ancestors = {*checkpoint.state.get("checkpoints", ()), train.iteration}
        train.checkpoints = sorted(ancestors & set(saved_iterations(path_of(config.load))))
    if config.override_ckpt_iteration is not None:
        _override_iteration(train, config.override_ckpt_iteration, runtime, checkpoint.state)
    return train, checkpoint.state["log"]


def _override_iteration(train: TrainState, iteration: int, runtime: Runtime, saved: Mapping[str, Any]) -> None:
    """Let a loaded run go on as from another iteration, for --override-ckpt-iteration.

    Raises ConfigError if steps had another size, since then the samples before that iteration are not known.
    """
    before = saved.get("global_batch_size", runtime.global_batch_size)
    if before != runtime.global_batch_size:
        raise ConfigError(
            f"--override-ckpt-iteration counts samples in steps of --global-batch-size ({runtime.global_batch_size}), but the "
            f"checkpoint's run had steps of {before}; give --global-batch-size {before}, or leave it out"
        )
    consumed = runtime.batch_sizes.consumed_after(0, iteration)
    print_rank_0(
        f"the checkpoint of iteration {train.iteration} counts as that of iteration {iteration}: training goes on at sample "
        f"{consumed} instead of {train.consumed_train_samples}"
    )
    train.iteration = iteration
    train.consumed_train_samples = consumed


def _parameter_of(name: str) -> str:
    """Return model/PARAMETER for optimizer/STATE/PARAMETER."""
    return _MODEL + name.split("/", 2)[2]


def read_tensors(
    checkpoint: Checkpoint | RankCheckpoint,
    model: dict[str, LocalTensor],
    optimizer_state: dict[str, LocalTensor],
    world: Axis,
    device: torch.device | str,
    *,
    load_optimizer: bool,
) -> None:
    """Fill the parameters and, if `load_optimizer`, the optimizer state. Every rank must call.

    model, optimizer_state: name -> this rank's part, which is filled in place. Raises CheckpointError. Masters that the
    checkpoint lacks are filled from the saved weights.
    """
    masters = {name: tensor for name, tensor in optimizer_state.items() if name.startswith(_MASTER)}

    # All ranks must read alike, so ask all: a rank's part of a local copy has no master if the rank owns no element.
    has_masters = any(name.startswith(_MASTER) for name in checkpoint.names)
    any_has_masters = collectives.all_reduce(
        torch.tensor([has_masters], dtype=torch.int32, device=device), world, "max"
    )
    reads_masters = load_optimizer and bool(any_has_masters.item())

    # parameters: if the run has no masters any more (resumed in full precision), the saved masters become the weights
    if reads_masters and not masters:
        by_saved_name = {}
        for name, tensor in model.items():
            master = name.replace(_MODEL, _MASTER, 1)
            saved_name = (
                master if master in checkpoint.names else name
            )  # a parameter that was not trained has no master
            by_saved_name[saved_name] = tensor
        model = by_saved_name
    reads = [model]

    # optimizer state: after the parameters, as with --reuse-fp32-param masters share memory with weights
    if load_optimizer:
        if reads_masters:
            reads.append(optimizer_state)
        else:
            reads.append({name: tensor for name, tensor in optimizer_state.items() if name not in masters})

    # masters that are not read: from the saved weights, which may be wider than this run's parameters
    if not reads_masters:
        reads.append({name.replace(_MASTER, _MODEL, 1): tensor for name, tensor in masters.items()})

    for tensors in reads:
        checkpoint.read_into(tensors, world, convert=True, device=device)
