"""A checkpoint of torchtitan as one of ours: its weights by our names, each a list of pieces of its chunks."""

from pathlib import Path

import torch

from megatron.convert.families.config_json import family_of, settings_of
from megatron.convert.formats.read_hf_folder import CONFIG, HFFolder, read_json
from megatron.convert.hf_reader import manifest_with, records_of
from megatron.convert.megatron_reader import manifest_as_text, opened_by_first
from megatron.convert.strided_checkpoint import StridedCheckpoint
from megatron.convert.torchtitan_to_hf import as_whole, check_tied_chunks, chunks_of_titan, divided, family_of_titan
from megatron.core.parallel import collectives
from megatron.core.parallel.grid import ALONE, Axis
from megatron.core.transformer.model_config import ModelConfig

_NOTE = "is a checkpoint of torchtitan: its weights are read, and not its optimizer's state"


def open_titan(root: Path, world: Axis = ALONE, device: torch.device | str = "cpu") -> StridedCheckpoint:
    """The model in a folder of torchtitan's, with the config.json in it, as a checkpoint that any layout reads; reads no
    tensors.

    Every rank of `world` must call. The first rank reads what describes the tensors for all.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            raw = read_json(root / CONFIG)
            config, kind = ModelConfig(**settings_of(raw, str(root / CONFIG))[0]), str(raw["model_type"])
            family = family_of_titan(family_of(raw, CONFIG), kind, config.rotary_percent)
            chunks = chunks_of_titan(root)
            if not config.untie_embeddings_and_output_weights:
                check_tied_chunks(root, chunks, *family.head_and_table())
            wholes = {name: as_whole(name, parts) for name, parts in chunks.items()}
            records = {name: divided(x, chunks) for name, x in records_of(family, config, wholes, root).items()}
            in_files = {f"{x.file} {x.start}": x for parts in chunks.values() for _, x in parts}
            text = manifest_as_text(root, f"{root} {_NOTE}", manifest_with(records, HFFolder(raw, in_files), root))
    return opened_by_first(text, world, device)
