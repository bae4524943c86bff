"""Open a checkpoint of torchtitan as one of ours: its weights by our names, each as pieces of its chunks."""

from pathlib import Path

import torch

from megatron.convert.families.read_and_write_hf_config import family_of, model_config_of, settings_of
from megatron.convert.formats.hf_config_and_safetensors_headers import CONFIG, HFFolder, read_json
from megatron.convert.megatron_reader import checkpoint_from_text, manifest_as_text
from megatron.convert.open_hf_safetensors_folder import manifest_with, tensor_records
from megatron.convert.strided_reads_of_foreign_files import StridedCheckpoint
from megatron.convert.torchtitan_to_hf_names import (
    check_tied_chunks,
    chunks_by_hf_name,
    family_of_titan,
    placeholder_tensor_of,
    split_into_chunks,
)
from megatron.core.parallel import collectives
from megatron.core.parallel.rank_grid import ALONE, Axis

_NOTE = "is a checkpoint of torchtitan: its weights are read, and not its optimizer's state"


def open_titan(root: Path, world: Axis = ALONE, device: torch.device | str = "cpu") -> StridedCheckpoint:
    """Open the model in a folder of torchtitan's, with a config.json in it, as one that any layout can load.

    Reads no tensors. Every rank of `world` must call. The first rank reads the description of the tensors, and
    broadcasts it.
    """
    text = None
    with collectives.raise_together(world, device):
        if world.is_first:
            # the model and the table of its family
            raw = read_json(root / CONFIG)
            settings, vocab_size = settings_of(raw, str(root / CONFIG))
            config = model_config_of(settings, str(root / CONFIG))
            family = family_of_titan(family_of(raw, CONFIG), str(raw["model_type"]), config.rotary_percent)

            # the chunks of each tensor
            chunks = chunks_by_hf_name(root)
            if not config.untie_embeddings_and_output_weights:
                check_tied_chunks(root, chunks, *family.output_and_embedding_weights())

            # our tensors, made of full tensors first, which are then replaced by their chunks
            full_tensors = {name: placeholder_tensor_of(name, parts) for name, parts in chunks.items()}
            records = {}
            for name, record in tensor_records(family, config, vocab_size, full_tensors, root).items():
                records[name] = split_into_chunks(record, chunks)
            in_files = {f"{x.file} {x.start}": x for parts in chunks.values() for _, x in parts}
            text = manifest_as_text(root, f"{root} {_NOTE}", manifest_with(records, HFFolder(raw, in_files), root))
    return checkpoint_from_text(text, world, device)
