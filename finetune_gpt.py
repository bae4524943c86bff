"""Fine-tune GPT on conversations, or on prompts with answers: --sft over the shared loop, all weights or LoRA adapters.

python finetune_gpt.py --pretrained-checkpoint FOLDER --data-path chats.jsonl --seq-length 2048 --epochs 2 --save-hf OUT ...

FOLDER is a published model's as it is, or a checkpoint. With --lora-rank N only adapters are trained and saved.
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, add_flags, build, option
from megatron.core.peft.lora_config import EXPERTS, PARTS, LoRAConfig, canonical_name, target_of, target_of_part
from megatron.training.arguments.parser import answer_help

DEFAULTS = {"sft": True, "eval_iters": 0, "use_checkpoint_args": True, "micro_batch_size": 1}
# Of a run with adapters: the base has none, and is not saved with them.
ADAPTER_DEFAULTS = {"allow_missing_tensors": True, "save_frozen": False}


@dataclass(frozen=True)
class EpochsConfig(FlagConfig):
    """Length of fine-tuning."""

    epochs: Count | None = option(
        None, "train on each example this many times, instead of --train-iters; an incomplete last batch is dropped"
    )


def add_own_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of adapters and of the length."""
    add_flags(parser, LoRAConfig)
    add_flags(parser, EpochsConfig)
    return parser


if __name__ == "__main__":
    answer_help(DEFAULTS, extra_args_provider=add_own_flags)

from torch import nn

import pretrain_gpt
from megatron.convert import open_any
from megatron.convert.families.hf_family_fields_and_param_mappings import Family
from megatron.convert.families.read_and_write_hf_config import kind_of
from megatron.convert.families.registry import FAMILIES
from megatron.convert.peft_folder import Pair, PeftFolder, base_of_state, fused_in_hf, read_peft_folder, targets_of
from megatron.core import parallel_state
from megatron.core.datasets.sft_dataset import samples_of_epochs
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.peft.lora import add_lora
from megatron.core.storage.path_or_url import path_of
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer.model_config import ModelConfig
from megatron.training import get_args, get_runtime, pretrain
from megatron.training.arguments.command_line import parse_args
from megatron.training.initialize import stop_with

train_valid_test_datasets_provider = pretrain_gpt.train_valid_test_datasets_provider
forward_step = pretrain_gpt.forward_step


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> nn.Module:
    """Build this pipeline stage's part of the model, as pretrain_gpt.py does, with its adapters if --lora-rank is given."""
    model = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    args = get_args()
    lora = build(LoRAConfig, vars(args))
    if not lora.is_on:
        return model
    config = get_runtime().config.transformer
    values = None
    if lora.lora_adapter is not None:
        values = values_of(peft_folder_of(lora.lora_adapter, args.pretrained_checkpoint)[0], lora)
    context = model.context
    # a run without --max-position-embeddings has as many positions as its longest sequence
    described = replace(config, max_position_embeddings=get_runtime().config.positions)
    whole = fused_in_hf("GPTModel", described, get_runtime().vocab_size)
    others = linears_of_some_layers(config)
    names = add_lora(
        model, lora, whole=whole, values=values, keys=context.keys, rows_of_sample=context.rows, elsewhere=others
    )
    wants_output_layer = "output_layer" in map(canonical_name, lora.lora_target_modules)
    if post_process and wants_output_layer and not any(name.endswith("output_layer") for name in names):
        raise ConfigError(
            "--lora-target-modules output_layer: the model's output layer has the embedding's weight, and none of its own; "
            "leave it out"
        )
    return model


# ---------------------------------------------------------------- defaults that follow from flags


def defaults_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of a command line: with adapters, their base's; of --lora-adapter, its rank and targets.

    With --epochs N the samples of N epochs, which reads the data. Raises ConfigError.
    """
    defaults = dict(DEFAULTS)
    adapter = value_of("--lora-adapter", argv)
    if adapter is not None or value_of("--lora-rank", argv) is not None:
        defaults |= ADAPTER_DEFAULTS
        if value_of("--save-hf", argv) is not None:
            raise ConfigError(
                "--save-hf writes a whole model, and this run trains adapters; give --save, and merge them with "
                "tools/lora.py --load DIR --base FOLDER --merge OUT"
            )
    if adapter is not None:
        folder, family, model = peft_folder_of(adapter, value_of("--pretrained-checkpoint", argv))
        lora = folder.lora
        defaults |= {"lora_rank": lora.lora_rank, "lora_alpha": lora.lora_alpha, "use_rslora": lora.use_rslora}
        defaults["lora_target_modules"] = targets_of(folder, family, model)
    epochs = value_of("--epochs", argv)
    if epochs is not None:
        for flag in ("--train-iters", "--train-samples"):
            if value_of(flag, argv) is not None:
                raise ConfigError(f"--epochs {epochs} and {flag} both give the length; give one")
        config, args, _ = parse_args([*argv, "--train-iters", "1"], add_own_flags, defaults)
        if problems := config.data.source_problems() + config.data.missing_files():
            raise ConfigError(problems)
        is_builder = parallel_state.launched_rank() == 0
        tokenizer = build_tokenizer(config.tokenizer)
        seed = config.training.seed
        samples = samples_of_epochs(config.data, tokenizer, seed, args.epochs, is_builder=is_builder)
        batch = config.training.global_batch_size or 1
        if samples < batch:
            raise ConfigError(
                f"--epochs {epochs} are {samples} samples of --seq-length {config.data.seq_length}, fewer than one step of "
                f"--global-batch-size {batch}; raise the one or lower the other"
            )
        defaults["train_samples"] = samples
    return defaults


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return the value of a flag among words, the last that is given."""
    value = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            value = argv[i + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def peft_folder_of(folder: str, base: str | None) -> tuple[PeftFolder, Family, ModelConfig]:
    """Return the adapters of a PEFT folder for the model of --pretrained-checkpoint, that model's family and settings."""
    if base is None:
        raise ConfigError("--lora-adapter needs the base as --pretrained-checkpoint")
    state = open_any(path_of(base)).state
    config = ModelConfig(**state["config"]["transformer"])
    kind, _ = base_of_state(state)
    family = FAMILIES[kind or kind_of("GPTModel", config, state["vocab_size"])]
    return read_peft_folder(Path(folder), family, config), family, config


def linears_of_some_layers(config: ModelConfig) -> set[str]:
    """Return the targets of MLPs that a pipeline stage may lack: of experts, and of a shared expert or layers without experts."""
    if not config.has_experts:
        return set()
    linears = {"linear_fc1", *PARTS["linear_fc1"], "linear_fc2"}
    targets = {f"{EXPERTS}{name}" for name in linears}
    layers = range(config.num_layers)
    has_dense = not all(map(config.is_moe_layer, layers)) or config.moe_shared_expert_intermediate_size is not None
    return targets | linears if has_dense else targets


def values_of(folder: PeftFolder, lora: LoRAConfig) -> Callable[[str, str], Pair]:
    """Return the values of a folder's adapters, for `add_lora`. Raises ConfigError for flags that contradict the folder."""

    def values(name: str, part: str) -> Pair:
        pair = folder.pairs.get((name, part))
        rank = lora.rank_of(target_of_part(target_of(name), part))
        if pair is None or pair.a.shape[-2] != rank:
            raise ConfigError(
                f"--lora-adapter {folder.folder} has no adapter of rank {rank} for {part or name}; leave "
                "--lora-rank and --lora-target-modules out, which it has itself"
            )
        return pair

    return values


def main() -> None:
    try:
        defaults = defaults_of(sys.argv[1:])
    except (ConfigError, CheckpointError) as error:
        if parallel_state.launched_rank() != 0:
            sys.exit(2)  # the first rank prints
        stop_with(ConfigError(error.problems))
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_own_flags,
        args_defaults=defaults,
        rules=GPTModel.rules,
    )


if __name__ == "__main__":
    main()
