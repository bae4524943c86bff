"""Write a model as a Hugging Face folder or a checkpoint of ours, a tensor at a time, or as torch's distributed checkpoints.

    python tools/checkpoint_convert.py --load checkpoints/books --save-hf books-hf
    python tools/checkpoint_convert.py --load Llama-3.2-1B --save-hf Llama-3.2-1B-float32 --dtype float32 --max-shard-size 1GB
    python tools/checkpoint_convert.py --load Llama-3.2-1B --save checkpoints/llama
    python tools/checkpoint_convert.py --load checkpoints/books --save-dcp books-dcp
    python tools/checkpoint_convert.py --load Llama-3.2-1B --save checkpoints/experts --num-experts 8 --moe-router-topk 2

--load is a folder of checkpoints, or a folder of another project in a format that the trainer reads directly. --save-hf and
--save need memory for two tensors. --save-dcp needs memory for the whole model, and writes a pickle (.metadata), which
loading executes. --num-experts turns a dense model into a mixture of experts that computes the same (upcycling).
"""
# ruff: noqa: E402  (--help is answered before torch is imported, which takes seconds)

import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.base.dataclass_flags import ConfigError, Count, FlagConfig, Positive, option
from megatron.core.transformer.layer_freq_pattern import read_pattern
from megatron.training.arguments.hf_export_config import DEFAULT_SHARD_SIZE, bytes_of, read_size
from tools.errors import answer_help, missing, run_tool, tool_parser


@dataclass(frozen=True)
class ConvertConfig(FlagConfig):
    """A model to write."""

    load: str | None = option(None, "folder with the model", metavar="DIR")
    iteration: int | None = option(None, "iteration to convert; default: the latest")
    save_hf: str | None = option(None, "Hugging Face folder to write, which must not exist", metavar="DIR")
    save: str | None = option(
        None,
        "checkpoint folder to write instead, in this project's format; it must not exist, and --load is then a model "
        "of another project, or --num-experts is given",
        metavar="DIR",
    )
    save_dcp: str | None = option(
        None,
        "folder to write instead with torch.distributed.checkpoint, which must not exist; it contains a pickle "
        "(.metadata)",
        metavar="DIR",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = option(
        None, "dtype of the written tensors; default: unchanged"
    )
    model_type: str | None = option(
        None,
        "model_type to write, such as llama; default: that of the Hugging Face model on which training "
        "began, or the first that can express the model",
    )
    max_shard_size: str | None = option(
        None, "largest size of one file of --save-hf, such as 500MB; default: 5GB", read=read_size
    )
    tokenizer: str | None = option(
        None,
        "folder whose tokenizer files are copied; default: the folder of the Hugging Face model on which "
        "training began",
        metavar="DIR",
    )
    allow_missing_tensors: bool = option(
        False, "write the model even if tensors are missing; each missing tensor is named"
    )

    num_experts: Count | None = option(
        None, "with --save: give each layer this many experts, made of its MLP, in a model that computes the same"
    )
    moe_router_topk: Count = option(2, "with --num-experts: experts of each token")
    moe_layer_freq: str = option(
        "1",
        "with --num-experts: which layers have experts: N: layers 0, N, 2 N, ...; or a list with 1 for those layers and 0 "
        "for the others",
        metavar="N|LIST",
        read=read_pattern,
    )
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = option(
        "softmax", "with --num-experts: scores of the experts of a token"
    )
    moe_router_topk_scaling_factor: Positive | None = option(
        None, "with --num-experts: multiply the weights of a token's experts by this; the experts are divided by it"
    )
    moe_upcycling_granularity: Count = option(
        1, "with --num-experts: an expert is the Nth part of the MLP instead of a copy of it"
    )
    seed: int = option(1234, "with --num-experts: random seed of the routers' first weights")

    def problems(self) -> list[str]:
        problems = missing(self, "load")
        outputs = [self.save_hf, self.save, self.save_dcp]
        if outputs.count(None) != 2:
            problems.append("give one of --save-hf, --save and --save-dcp")
        local_folders = {"--save-hf": self.save_hf, "--save-dcp": self.save_dcp, "--tokenizer": self.tokenizer}
        for flag, folder in local_folders.items():
            if folder is not None and is_url(folder):
                problems.append(f"{flag} {folder} is a URL, and a folder of this machine is needed; give one")
        if self.save_hf is None:
            hf_flags = {
                "--model-type": self.model_type,
                "--tokenizer": self.tokenizer,
                "--max-shard-size": self.max_shard_size,
            }
            for flag, value in hf_flags.items():
                if value is not None:
                    problems.append(f"{flag} is for --save-hf: leave it out")
        if self.num_experts is not None and self.save is None:
            problems.append("--num-experts is for --save: give it too, or leave --num-experts out")
        if self.num_experts is None:
            for f in fields(self):
                is_of_experts = f.name.startswith("moe_") or f.name == "seed"
                if is_of_experts and getattr(self, f.name) != f.default:
                    problems.append(f"--{f.name.replace('_', '-')} is for --num-experts: give it too, or leave it out")
        return problems


if __name__ == "__main__":
    answer_help(lambda: tool_parser(__doc__, [ConvertConfig]))

import torch
from torch.distributed import checkpoint as dcp

from megatron.convert import copy_checkpoint, open_any, write_hf_folder
from megatron.convert.missing_params_and_absent_heads import check_complete
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint
from megatron.convert.upcycle_to_experts import Upcycling, upcycle
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.dist_checkpointing.local_tensor import LocalTensor
from megatron.core.dist_checkpointing.unsaved_buffers_in_checkpoint import note_of_lost_buffers
from megatron.core.sharding.boxes import whole
from megatron.core.storage.file_layer import backend_of, exists, remove_tree
from megatron.core.storage.path_or_url import is_url, path_of

_TAKEN_BY_A_RUN = "a run takes it as --pretrained-checkpoint, with --use-checkpoint-args"
# settings of the model that is written with experts
_OF_EXPERTS = (
    *("num_experts", "moe_router_topk", "moe_layer_freq", "moe_router_score_function"),
    "moe_router_topk_scaling_factor",
)
_MODEL = "model/"  # prefix of the names of a model's tensors in a checkpoint


def convert(config: ConvertConfig) -> None:
    """Convert --load into the one output that was asked for."""
    checkpoint = open_any(config.load, config.iteration)
    if checkpoint.warning:
        print(f"WARNING: {checkpoint.warning}")
    if note := note_of_lost_buffers(checkpoint.state):
        print(note)

    # --save: a checkpoint of ours with experts, or one from a folder of another project
    if config.num_experts is not None:
        names = [f.name for f in fields(config) if f.name in _OF_EXPERTS]
        settings = {name: getattr(config, name) for name in names}
        upcycling = Upcycling(settings, config.moe_upcycling_granularity, config.seed)
        options = {"allow_missing": config.allow_missing_tensors, "note": print}
        upcycle(checkpoint, config.save, upcycling, config.dtype, **options)
        print(f"{config.load}: written to {config.save} with {config.num_experts} experts; {_TAKEN_BY_A_RUN}")
        return
    if config.save is not None:
        if not isinstance(checkpoint, StridedCheckpoint):
            raise ConfigError(f"--save: {config.load} is a checkpoint of ours already, which any layout loads")
        copy_checkpoint(checkpoint, config.save, config.dtype, allow_missing=config.allow_missing_tensors, note=print)
        print(f"{config.load}: written to {config.save}, weights alone; {_TAKEN_BY_A_RUN}")
        return

    # --save-dcp: a folder of torch.distributed.checkpoint
    if config.save_dcp is not None:
        names = checkpoint.manifest.tensors
        check_complete(checkpoint.state, names, str(checkpoint.folder), allow=config.allow_missing_tensors, note=print)
        write_dcp_folder(checkpoint, path_of(config.save_dcp), config.dtype)
        print(f"{config.load}: written to {config.save_dcp}; its .metadata is a pickle, which torch runs when it loads")
        return

    # --save-hf
    model_type = write_hf_folder(
        checkpoint,
        path_of(config.save_hf),
        kind=config.model_type,
        dtype=config.dtype,
        most_bytes=bytes_of(config.max_shard_size or DEFAULT_SHARD_SIZE),
        tokenizer_folder=path_of(config.tokenizer) if config.tokenizer else None,
        allow_missing=config.allow_missing_tensors,
        note=print,
    )
    print(f"{config.load}: written to {config.save_hf} as a {model_type}")


def write_dcp_folder(checkpoint: Checkpoint, out: Path, dtype: str | None = None) -> None:
    """Write the model's tensors with torch.distributed.checkpoint, under the names of the parameters.

    out: must not exist; the folder gets this name when it is complete. dtype: default: as in the checkpoint. The format
    contains a pickle. Raises ConfigError, CheckpointError, OSError; ValueError if torch's writer fails.
    """
    partial = out.with_name(out.name + ".partial")
    if exists(out):
        raise ConfigError(f"{out} exists already; give a folder that does not exist")
    if exists(partial):
        remove_tree(partial)

    # read the full tensors
    tensors = {}
    for name, record in checkpoint.manifest.tensors.items():
        if name.startswith(_MODEL):
            tensor = torch.empty(record.shape, dtype=getattr(torch, dtype or record.dtype))
            box = whole(record.shape)
            target = LocalTensor(tensor, record.shape, [(box, box)], is_writer=False)
            checkpoint.read_into({name: target}, convert=True)
            tensors[name.removeprefix(_MODEL)] = tensor

    # write them under a temporary name, then rename
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            dcp.save(tensors, checkpoint_id=partial, no_dist=True)
        except dcp.CheckpointException as error:  # derives from BaseException
            raise ValueError(f"{partial}: torch's writer failed: {error}") from error
    backend_of(partial).rename(partial, out)
    backend_of(out).sync_folder(out.parent)


def main(arguments: list[str] | None = None) -> int:
    return run_tool(__file__, __doc__, [ConvertConfig], convert, arguments, "what was written is incomplete: remove it")


if __name__ == "__main__":
    sys.exit(main())
