"""What a checkpoint of a run holds: parameters and optimizer state as boxes, everything else as JSON.

    model/<parameter>                       in the model's precision
    optimizer/exp_avg/<parameter>           Adam's moments, float32
    optimizer/exp_avg_sq/<parameter>
    optimizer/momentum_buffer/<parameter>   those of SGD
    optimizer/master/<parameter>            float32 masters of half-precision parameters

There is no state of random generators to save: draws follow from the seed and from the position in the run.
"""

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import comm
from megatron.core.boxes import pieces_of_run, size_of
from megatron.core.checkpoint import Checkpoint, LocalTensor, open_checkpoint, save_checkpoint
from megatron.core.checkpoint.format import iteration_of
from megatron.core.config import ConfigError, default_of, knobs
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.grid import Axis
from megatron.core.mesh import Mesh
from megatron.core.optimizer.optimizer import FlatOptimizer
from megatron.core.placement import owned_pieces, pieces
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.runtime import Runtime, print_rank_0
from megatron.training.start import where_to_start
from megatron.training.state import TrainState

# Settings that decide what the parameters mean: a checkpoint made with others cannot be loaded.
_SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "group_query_attention",
    "num_query_groups", "position_embedding_type", "rotary_base", "rotary_percent", "normalization", "norm_epsilon",
    "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights",
)  # fmt: skip
# Settings that, changed under a resumed run, change its data or its schedule: said aloud, and allowed.
_NOTABLE = (
    "seed", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "train_iters", "train_samples", "seq_length",
    "split",
)  # fmt: skip


def model_tensors(chunks: Sequence[DistributedDataParallel], mesh: Mesh) -> dict[str, LocalTensor]:
    """This rank's part of every parameter, by its name in the checkpoint: in ZeRO stage 3 its shard."""
    return {
        f"model/{name}": _local(parameter, parameter.data, mesh)
        if name not in shards
        else _run(parameter, *shards[name], mesh)
        for chunk in chunks
        for shards in [chunk.param_shards()]
        for name, parameter in chunk.module.named_parameters()
    }


def optimizer_tensors(optimizer: FlatOptimizer, mesh: Mesh) -> dict[str, LocalTensor]:
    """This rank's part of the optimizer's state, by its name in the checkpoint."""
    parameters = {name: p for buffer in optimizer.buffers for name, p in buffer.parameters.items()}
    kept = optimizer.kept_of()
    divided = {name for buffer in optimizer.buffers if buffer.outer_axis.size > 1 for name in buffer.parameters}
    return {
        f"optimizer/{kind}/{name}": _run(parameters[name], kept[name], tensor, mesh, is_copied=name not in divided)
        if name in kept
        else _local(parameters[name], tensor, mesh)
        for kind, tensors in optimizer.tensors().items()
        for name, tensor in tensors.items()
    }


def count_parameters(chunks: Sequence[DistributedDataParallel], mesh: Mesh, device: torch.device | str) -> int:
    """Elements of the whole model, each counted once. One all-reduce of a number; every rank must call."""
    mine = sum(
        math.prod(size_of(box))
        for tensor in model_tensors(chunks, mesh).values()
        if tensor.is_writer
        for box, _ in tensor.pieces
    )
    return int(comm.all_reduce(torch.tensor([mine], dtype=torch.int64, device=device), mesh["world"]).item())


def _local(parameter: nn.Parameter, tensor: Tensor, mesh: Mesh) -> LocalTensor:
    placement, shape = parameter.placement, tuple(tensor.shape)
    owned = owned_pieces(placement, shape, mesh)
    copies = tuple(pair for pair in pieces(placement, shape, mesh) if pair not in owned)
    speaks = bool(owned) and all(mesh[name].is_first for name in placement.reduce_over)
    return LocalTensor(tensor, placement.shape, owned, speaks, copies)


def _run(
    parameter: nn.Parameter, kept: tuple[int, int], values: Tensor, mesh: Mesh, *, is_copied: bool = True
) -> LocalTensor:
    """The same of a parameter in shards over dp_inner, of which `values` are the elements `kept`. is_copied: whether the ranks of
    dp_outer hold the same ones."""
    whole = _local(parameter, parameter, mesh)
    owned, copies = (tuple(pieces_of_run(pairs, kept, parameter.shape)) for pairs in (whole.pieces, whole.copies))
    others = [name for name in parameter.placement.reduce_over if name != "dp_inner" and is_copied]
    speaks = bool(owned) and all(mesh[name].is_first for name in others)
    return LocalTensor(values, whole.shape, list(owned), speaks, copies)


def prepare_folder(root: str | None, world: Axis, device: torch.device, held: contextlib.ExitStack) -> None:
    """Find out at the start, not after hours, whether checkpoints can be written to `root`. Every rank must call.

    No other run may save there until `held` is closed.
    """
    with comm.together(world, device):
        if root is not None and world.is_first:
            try:
                Path(root).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=root):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"--save {root} cannot be written: {error.strerror}; choose another folder"
                ) from error
            _lock(root, held)


def _lock(root: str, held: contextlib.ExitStack) -> None:
    """Lock the folder itself, so that no file is left there, and the system unlocks it when this process is killed."""
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    held.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--save {root}: another run saves there, and is alive; each would remove what the other is writing. End that run or "
            "choose another folder"
        ) from None
    except OSError:  # some network file systems do not lock folders: then nobody is refused
        pass


def note_other_checkpoints(root: str | None, iteration: int, world: Axis) -> None:
    """Say of a run that begins after `iteration` that --save holds later checkpoints, which it does not go on from."""
    if root is None or not world.is_first:
        return
    found = (iteration_of(path.name) for path in Path(root).glob("iter_*"))
    if later := sorted(number for number in found if number is not None and number > iteration):
        print_rank_0(
            f"--save {root} holds {len(later)} checkpoint(s) of up to iteration {later[-1]}, which this run does not go on from; "
            "it will replace those it comes to"
        )


def save(
    runtime: Runtime,
    chunks: Sequence[DistributedDataParallel],
    optimizer: FlatOptimizer,
    state: TrainState,
    log_state: dict[str, Any],
) -> None:
    """Write a checkpoint of this step. Every rank must call. `log_state` is that of the last rank."""
    mesh, device, root = runtime.mesh, runtime.device.torch_device, runtime.config.checkpoint.save
    for chunk in chunks:
        chunk.finish_param_gather()
    world = mesh["world"]
    log_text = comm.broadcast_text(json.dumps(log_state), world, device, source=world.size - 1)
    save_checkpoint(
        Path(root),
        state.iteration,
        model_tensors(chunks, mesh)
        | (optimizer_tensors(optimizer, mesh) if runtime.config.checkpoint.save_optim else {}),
        {
            "train": state.as_json(),
            "log": json.loads(log_text),
            "global_batch_size": runtime.global_batch_size,
            "optimizer_steps": optimizer.step_count,
            "grad_scaler": {} if optimizer.scaler is None else optimizer.scaler.state(),
            "vocab_size": runtime.tokenizer.vocab_size,
            "config": runtime.config.as_json(),
        },
        world,
        device,
    )
    print_rank_0(f"saved checkpoint at iteration {state.iteration} to {root}")


def load(
    runtime: Runtime, chunks: Sequence[DistributedDataParallel], optimizer: FlatOptimizer
) -> tuple[TrainState, dict[str, Any] | None]:
    """(where to go on, the log's state), with parameters and optimizer filled from --load. Every rank must call.

    The checkpoint may come from any layout. Where there is none yet the run starts anew, and says so, or from the weights of
    --pretrained-checkpoint.
    """
    config, mesh, device = runtime.config.checkpoint, runtime.mesh, runtime.device.torch_device
    if config.load is None and config.pretrained_checkpoint is None:
        return TrainState(), None
    with comm.together(mesh["world"], device):
        chosen = json.dumps(where_to_start(config)) if mesh["world"].is_first else None
    chosen = json.loads(comm.broadcast_text(chosen, mesh["world"], device))
    if chosen is None:
        print_rank_0(f"no checkpoint in {config.load}: starting from initial weights")
        return TrainState(), None
    given, root, finetune = chosen
    checkpoint = open_checkpoint(Path(root), world=mesh["world"], device=device)
    check_same_model(runtime, checkpoint.state, f"{given} {root}")
    wanted = model_tensors(chunks, mesh)
    check_same_parameters(wanted, checkpoint, mesh["world"], device)
    goes_on = config.load_optim and not finetune
    if goes_on:
        check_same_optimizer(runtime, checkpoint.state)
    state_tensors = optimizer_tensors(optimizer, mesh) if goes_on else {}
    has_masters = any(name.startswith("optimizer/master/") for name in checkpoint.names)
    wants_masters = any(name.startswith("optimizer/master/") for name in state_tensors)
    if not has_masters:  # saved in full precision: the weights are the masters
        state_tensors = {n: t for n, t in state_tensors.items() if not n.startswith("optimizer/master/")}
    elif goes_on and not wants_masters:  # going on in full precision: the masters are the weights
        wanted = {_master_of(name, checkpoint): tensor for name, tensor in wanted.items()}
    checkpoint.read_into(wanted, mesh["world"], convert=True, device=device)
    checkpoint.read_into(
        state_tensors, mesh["world"], convert=True, device=device
    )  # after, as masters may hold weights
    if not (goes_on and has_masters):  # the saved weights, which may have more digits than this run's parameters
        masters = {n: t for n, t in optimizer_tensors(optimizer, mesh).items() if n.startswith("optimizer/master/")}
        weights = {name.replace("optimizer/master/", "model/", 1): tensor for name, tensor in masters.items()}
        checkpoint.read_into(weights, mesh["world"], convert=True, device=device)
    if optimizer.config.reuse_fp32_param:  # the rank's part of a weight is now its master rounded; the rest are others'
        for chunk in chunks:
            chunk.gather_params()
            chunk.finish_param_gather()
    if goes_on:
        optimizer.set_step_count(checkpoint.state["optimizer_steps"])
        if optimizer.scaler is not None:
            optimizer.scaler.load_state(checkpoint.state.get("grad_scaler", {}))
    print_rank_0(f"loaded {'checkpoint' if goes_on else 'weights'} of iteration {checkpoint.iteration} from {root}")
    if finetune:
        return TrainState(), None
    note_changes(runtime, checkpoint.state)
    return TrainState.from_json(checkpoint.state["train"]), checkpoint.state["log"]


def _master_of(name: str, checkpoint: Checkpoint) -> str:
    """The name of a parameter's master copy, or its own where it was not trained and has none."""
    master = name.replace("model/", "optimizer/master/", 1)
    return master if master in checkpoint.names else name


def check_same_parameters(
    mine: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a checkpoint with parameters that no rank's part of the model has. One all-reduce; every rank must call."""
    names = sorted(name for name in checkpoint.names if name.startswith("model/"))
    holders = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device)
    comm.all_reduce(holders, world)
    lacking = [name.removeprefix("model/") for name, count in zip(names, holders.tolist()) if not count]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigError(
            f"{checkpoint.folder} holds parameters that this run's model lacks: {', '.join(lacking[:3])}{more}; it was written by "
            "another kind of model, or with other flags of this one"
        )


def check_same_model(runtime: Runtime, saved: dict[str, Any], given: str) -> None:
    """Refuse a checkpoint of another model, naming every setting that differs. given: the flag and folder it comes from."""
    mine, theirs = runtime.config.as_json()["transformer"], saved["config"]["transformer"]
    defaults = {f.name: default_of(f) for f in knobs(TransformerConfig)}  # for settings younger than the checkpoint
    problems = [
        f"{name}: the checkpoint has {theirs.get(name, defaults[name])}, this run has {mine[name]}"
        for name in _SHAPE
        if theirs.get(name, defaults[name]) != mine[name]
    ]
    if saved["vocab_size"] != runtime.tokenizer.vocab_size:
        problems.append(
            f"vocabulary: the checkpoint has {saved['vocab_size']} words, this run's tokenizer {runtime.tokenizer.vocab_size}"
        )
    if problems:
        raise ConfigError([f"{given} holds another model; {p}" for p in problems])


def check_same_optimizer(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Refuse the state of an optimizer that keeps other moments, or a checkpoint without any."""
    if not saved["config"]["checkpoint"].get("save_optim", True):
        raise ConfigError(
            f"--load {runtime.config.checkpoint.load} holds no optimizer state (saved with --no-save-optim); --no-load-optim "
            "starts with the weights alone"
        )
    mine, theirs = runtime.config.as_json()["optimizer"], {"optimizer": "adam"} | saved["config"]["optimizer"]
    if mine["optimizer"] != theirs["optimizer"]:
        raise ConfigError(
            f"--load {runtime.config.checkpoint.load} holds the state of --optimizer {theirs['optimizer']}, this run has "
            f"{mine['optimizer']}; --no-load-optim starts with the weights alone"
        )
    if mine["optimizer"] == "sgd" and bool(mine["sgd_momentum"]) > bool(theirs["sgd_momentum"]):
        raise ConfigError(
            f"--load {runtime.config.checkpoint.load} holds no momentum (--sgd-momentum was 0); --no-load-optim starts "
            "with the weights alone"
        )


def note_changes(runtime: Runtime, saved: dict[str, Any]) -> None:
    """Say which settings of a resumed run differ from the saved ones in a way that changes its course."""
    flat = [{k: v for part in c.values() for k, v in part.items()} for c in (runtime.config.as_json(), saved["config"])]
    # In force: the setting may be unset in both. Older checkpoints do not say.
    before = saved.get("global_batch_size", TrainState.from_json(saved["train"]).samples_per_iter)
    flat[0]["global_batch_size"], flat[1]["global_batch_size"] = runtime.global_batch_size, before
    for name in _NOTABLE:
        if flat[0][name] != flat[1].get(name):
            print_rank_0(f"resumed with another {name}: {flat[1].get(name)} before, {flat[0][name]} now")
