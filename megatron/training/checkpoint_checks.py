"""Whether a checkpoint is one that this run can go on from: of the same model and optimizer; and what else has changed since."""

from typing import Any

import torch

from megatron.core import comm
from megatron.core.checkpoint import Checkpoint, LocalTensor
from megatron.core.config import ConfigError, default_of, knobs
from megatron.core.grid import Axis
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config import Config
from megatron.training.runtime import Runtime, print_rank_0
from megatron.training.state import TrainState

# Settings that decide what the parameters mean: a checkpoint made with others cannot be loaded.
_SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "group_query_attention",
    "num_query_groups", "position_embedding_type", "rotary_base", "rotary_percent", "normalization", "norm_epsilon",
    "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights",
)  # fmt: skip
_POSITIONS = "embedding.position_embeddings.weight"
# Settings that, changed under a resumed run, change its data or its schedule: said aloud, and allowed.
_NOTABLE = (
    "seed", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule", "train_iters", "train_samples", "seq_length",
    "split",
)  # fmt: skip


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


def check_same_positions(
    config: Config, mine: dict[str, LocalTensor], checkpoint: Checkpoint, world: Axis, device: torch.device
) -> None:
    """Refuse a learned position table of other rows, by the flag that sets them. One all-reduce; every rank must call."""
    with comm.together(world, device):
        for name in (name for name in mine if name.endswith(_POSITIONS) and name in checkpoint.names):
            saved, rows = checkpoint.manifest.tensors[name].shape[0], mine[name].shape[0]
            if saved != rows and rows == config.positions:
                raise ConfigError(
                    f"{checkpoint.folder} has {saved} learned positions, {_other_positions(config, saved)}"
                )


def _other_positions(config: Config, saved: int) -> str:
    """What this run has instead of that many, and the flags that go with the saved ones."""
    length, rows = config.data.seq_length, config.transformer.max_position_embeddings
    has = f"this run {rows} (--max-position-embeddings)" if rows else f"this run {length} (--seq-length)"
    shorter = f" with --seq-length {saved} or less, which is now {length}" if length > saved else ""
    return f"{has}; --max-position-embeddings {saved} keeps the saved table{shorter}"


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
