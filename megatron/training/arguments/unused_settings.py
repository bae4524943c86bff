"""A flag may be given that no code reads under the other settings: a note at the start names it, with the reason."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.base.dataclass_flags import default_of, flags_of, option_fields
from megatron.core.optimizer.muon_config import MuonConfig

_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
_MUON = (*(field.name for field in option_fields(MuonConfig)), "muon_scalar_optimizer")
# The function of an optimizer -> the settings that it reads.
_READ_BY = {"AdamW": _ADAM, "Adam with L2": _ADAM, "SGD": ("sgd_momentum",), "Muon": _MUON}


def unread_flags(config: Any) -> dict[str, str]:
    """Return flag -> why it has no effect, for flags whose value is not the default. config: a `Config`."""
    rules = (_of_model, _of_optimizer, _of_learning_rate, _of_loss_scale, _of_exits, _of_data, _of_saving, _of_outputs)
    reasons = {}
    for rule in rules:
        for part, names, reason in rule(config):
            for flag in _changed(part, names):
                reasons[flag] = reason
    return reasons


Unread = tuple[Any, Sequence[str], str]  # a component, the settings that nothing reads, why


def _changed(part: Any, names: Sequence[str]) -> Iterator[str]:
    """Yield the flags of those settings that are not at their default."""
    fields = {field.name: field for field in option_fields(type(part))}
    for name in names:
        if getattr(part, name) != default_of(fields[name]):
            yield flags_of(fields[name])[0]


def _of_model(config: Any) -> Iterator[Unread]:
    model = config.transformer
    if model.position_embedding_type != "rope":
        why = "only --position-embedding-type rope rotates"
        yield model, ("rotary_base", "rotary_percent", "rope_scaling_factor"), why
    elif not model.ropes:
        of_rotation = (
            "rotary_base",
            "rotary_percent",
            "rotary_interleaved",
            "rotary_seq_len_interpolation_factor",
            "use_rope_scaling",
            "rope_scaling_factor",
            "rope_scaling",
            "rotary_base_of_windows",
        )
        yield model, of_rotation, f"no layer rotates with --no-rope-freq {model.no_rope_freq}"
    if model.window_attn_skip_freq and all(model.window_left(layer) is None for layer in range(model.num_layers)):
        yield (
            model,
            ("window_size",),
            f"no layer has a window with --window-attn-skip-freq {model.window_attn_skip_freq}",
        )
    if model.untie_embeddings_and_output_weights:
        yield model, ("scale_decoder_outputs",), "the output layer is not the word table"
    if not (model.bf16 or model.fp16):
        yield model, ("cpu_half_products",), "only --bf16 and --fp16 have half-precision products"
    if model.position_embedding_type == "none" or (model.position_embedding_type == "rope" and not model.ropes):
        yield config.data, ("reset_position_ids",), "no layer of the model reads positions"
    if model.init_method_xavier_uniform and model.softmax_type != "learnable":
        yield model, ("init_method_std",), "--init-method-xavier-uniform draws by the sizes of a matrix"


def _of_optimizer(config: Any) -> Iterator[Unread]:
    """Yield the settings of our own optimizers; an optimizer of a script may read any of them."""
    if config.optimizer.weight_decay_incr_style != "constant":
        style = f"--weight-decay-incr-style {config.optimizer.weight_decay_incr_style}"
        yield config.optimizer, ("weight_decay",), f"{style} goes from --start-weight-decay to --end-weight-decay"
    read: set[str] = set()
    for function in config.optimizer.functions.values():
        if function not in _READ_BY:
            return
        read.update(_READ_BY[function])
    unread: list[str] = []
    for names in _READ_BY.values():
        for name in names:
            if name not in read and name not in unread:
                unread.append(name)
    yield config.optimizer, unread, f"--optimizer {config.optimizer.optimizer} does not read it"


def _of_learning_rate(config: Any) -> Iterator[Unread]:
    rate = config.learning_rate
    checkpoint = config.checkpoint
    if not (rate.lr_warmup_iters or rate.lr_warmup_samples or rate.lr_warmup_fraction):
        yield rate, ("lr_warmup_init", "lr_warmup_style"), "there is no warm-up"
    if rate.lr_decay_style != "WSD":
        yield rate, ("lr_wsd_decay_style",), "only --lr-decay-style WSD has it"
    if rate.lr_decay_style == "constant":
        of_decay = ["min_lr", "decoupled_min_lr"]
        if not rate.lr_warmup_fraction:  # a fraction of the decay
            of_decay += ["lr_decay_iters", "lr_decay_samples"]
        yield rate, of_decay, "--lr-decay-style constant does not decay"
    if checkpoint.load is None:
        why = "nothing is loaded without --load"
        if checkpoint.pretrained_checkpoint or checkpoint.hf_config:
            why = "weights alone are loaded without --load"
        yield rate, ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"), why


def _of_loss_scale(config: Any) -> Iterator[Unread]:
    scaling = config.loss_scaling
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if scaling.loss_scale:
        yield scaling, dynamic, f"--loss-scale {scaling.loss_scale:g} is fixed"
    elif not config.transformer.fp16:
        yield scaling, dynamic, "the loss is scaled with --fp16 alone"


def _of_exits(config: Any) -> Iterator[Unread]:
    if not config.training.exit_signal_handler:
        yield (
            config.training,
            ("exit_signal",),
            "nothing waits for it without --exit-signal-handler: it ends the process",
        )


def _of_data(config: Any) -> Iterator[Unread]:
    if config.data.mock_data:
        of_files = ("data_cache_path", "mid_level_dataset_surplus", "mmap_bin_files", "epoch_stable_order")
        yield config.data, of_files, "made-up data have no files"


def _of_saving(config: Any) -> Iterator[Unread]:
    if config.checkpoint.save is None:
        yield config.checkpoint, ("save_optim",), "nothing is saved without --save"


def _of_outputs(config: Any) -> Iterator[Unread]:
    """Yield requested numbers that have no output. Settings of how often or by whom numbers are shown request none."""
    log = config.log
    curves = config.tensorboard
    if curves.is_on:
        return
    of_steps = ("log_batch_size_to_tensorboard", "log_memory_to_tensorboard", "log_world_size_to_tensorboard")
    yield curves, of_steps, "there are no curves without --tensorboard-dir or --wandb-project"
    if log.metrics_file is None:
        of_records = ("log_validation_ppl_to_tensorboard", "log_timers_to_tensorboard")
        yield curves, of_records, "nothing takes it without --tensorboard-dir, --wandb-project or --metrics-file"
