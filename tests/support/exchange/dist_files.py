"""Checkpoints as Megatron-core writes them in torch_dist, and torchtitan: chunks of whole tensors, by torch's own writer.

    write_dist(root, "llama", tp=2)      root/iter_0000007/.metadata, __0_0.distcp, __0_1.distcp, common.pt, metadata.json

The weights are those of the folders of Hugging Face, so what transformers computes is what must come out.
"""

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

sys.path.append(str(Path(__file__).parent))
from megatron_files import ITERATION, args_of, experts_of_layer, gpt2_layer, llama_layer, padded, tensors_of


class Chunks(Tensor):
    """A tensor that several ranks have saved, cut along a dimension, and along the layers that lie stacked in the first."""

    @staticmethod
    def __new__(cls, whole: Tensor, *cut: Any) -> "Chunks":
        return Tensor._make_subclass(cls, whole)

    def __init__(self, whole: Tensor, parts: int, dim: int, stacked: bool):
        self.whole, self.pieces = whole, {}
        layers = range(whole.shape[0]) if stacked else [None]
        for layer in layers:
            x = whole if layer is None else whole[layer : layer + 1]
            start = 0
            for piece in x.chunk(parts, dim) if parts > 1 else [x]:
                offsets = [0] * whole.dim()
                offsets[dim] = start
                if layer is not None:
                    offsets[0] = layer
                self.pieces[torch.Size(offsets)] = piece.contiguous()
                start += piece.shape[dim]

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, piece.shape), TensorProperties(piece.dtype), self.whole.shape
                ),
            )
            for offsets, piece in self.pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.offset]


# Dimension that tensor-parallel ranks divide, of a layer's tensors.
DIVIDED = {"linear_qkv.weight": 0, "linear_qkv.bias": 0, "linear_fc1.weight": 0, "linear_fc1.bias": 0}
DIVIDED |= {"linear_proj.weight": 1, "linear_fc2.weight": 1, "query_key_value.weight": 0, "dense.weight": 1}


def core_layer(x: dict[str, Tensor], case: str, i: int) -> dict[str, Tensor]:
    """A layer with the names of torch_dist: those of Transformer Engine, whatever has computed it."""
    if case != "gpt2":
        return llama_layer(x, i, 0, 1, fused_norms=True) | experts_of_layer(x, i, 0, 1, range(4), "stacked")
    renamed = {
        "attention.query_key_value": "self_attention.linear_qkv",
        "attention.dense": "self_attention.linear_proj",
    }
    renamed |= {"mlp.dense_h_to_4h": "mlp.linear_fc1", "mlp.dense_4h_to_h": "mlp.linear_fc2"}
    found = {}
    for name, tensor in gpt2_layer(x, i, 0, 1, 2.0).items():
        start, kind = name.rsplit(".", 1)
        norm = {"input_layernorm": "self_attention.linear_qkv", "post_attention_layernorm": "mlp.linear_fc1"}.get(start)
        found[f"{norm}.layer_norm_{kind}" if norm else f"{renamed[start]}.{kind}"] = tensor
    return found


def tensors_of_core(case: str, *, tp: int, stacked: bool, halves: bool) -> dict[str, Any]:
    """All tensors of the model by their names; halves: gates and ups apart."""
    x = tensors_of(case)
    words, last = {"gpt2": ("transformer.wte.weight", "transformer.ln_f")}.get(
        case, ("model.embed_tokens.weight", "model.norm")
    )
    found: dict[str, Any] = {"embedding.word_embeddings.weight": Chunks(padded(x[words]), tp, 0, False)}
    for kind in ("weight", "bias"):
        if f"{last}.{kind}" in x:
            found[f"decoder.final_layernorm.{kind}"] = Chunks(x[f"{last}.{kind}"], 1, 0, False)
    if case == "gpt2":
        found["embedding.position_embeddings.weight"] = Chunks(x["transformer.wpe.weight"], 1, 0, False)
    if "lm_head.weight" in x:
        found["output_layer.weight"] = Chunks(padded(x["lm_head.weight"]), tp, 0, False)
    layers = [core_layer(x, case, i) for i in range(3)]
    for name in dict.fromkeys(name for layer in layers for name in layer):
        dim = next((dim for end, dim in DIVIDED.items() if name.endswith(end)), None)
        parts = 1 if dim is None else tp
        mine = {name: [layer.get(name) for layer in layers]}
        if ".experts." in name and dim is not None:
            dim += 1
        if halves and "linear_fc1.weight" in name:
            mine = {
                f"{name}_{half}": [x if x is None else x.chunk(2, dim or 0)[n] for x in mine[name]]
                for n, half in enumerate("wv")
            }
        for full, tensors in mine.items():
            if stacked:
                found[f"decoder.layers.{full}"] = Chunks(torch.stack(tensors), parts, 1 + (dim or 0), True)
            else:
                for i, tensor in enumerate(tensors):
                    if tensor is None:
                        continue
                    found[f"decoder.layers.{i}.{full}"] = Chunks(tensor, parts, dim or 0, False)
    return found


def write_dist(
    root: Path,
    case: str,
    *,
    tp: int = 1,
    stacked: bool = True,
    halves: bool = False,
    common: str = "file",
    change: Any = lambda state: None,
    **more: Any,
) -> Path:
    """The folder of a run; returns that of its iteration. common: where the arguments are, "file" or "item"."""
    folder = root / f"iter_{ITERATION:07d}"
    folder.mkdir(parents=True)
    state = tensors_of_core(case, tp=tp, stacked=stacked, halves=halves)
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = Chunks(torch.ones(24), 1, 0, False)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_3"] = saved([torch.zeros(3, dtype=torch.uint8)])
    state["rng_state/shard_0_1"] = saved([{"torch_rng_state": torch.get_rng_state()}])
    values = {"args": args_of(case, **more), "iteration": ITERATION, "checkpoint_version": 3.0}
    if common == "file":
        torch.save(values, folder / "common.pt")
    else:
        state["common_state/shard_0_1"] = saved([values])
    change(state)
    write_dcp(folder, state)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backend))
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return folder


class Packed(dcp.DefaultSavePlanner):
    """Objects are files of torch.save already."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        return value


def write_dcp(folder: Path, state: dict[str, Any]) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=2, sync_files=False)
    with warnings.catch_warnings(action="ignore"):  # of a process that is alone
        dcp.save(state, storage_writer=writer, planner=Packed(), no_dist=True)


def saved(value: Any) -> io.BytesIO:
    """What an object of a folder is: a file of torch.save."""
    made = io.BytesIO()
    torch.save(value, made)
    return made
