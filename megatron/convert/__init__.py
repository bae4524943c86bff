"""Read models of other projects directly from their folders, and write Hugging Face folders.

One table for each model family serves both.

    open_any_format                       finds out which project a folder is of
    open_hf_safetensors_folder,           open it
    megatron_reader, torchtitan_reader
    strided_reads_of_foreign_files        tensors as byte ranges of the folder's files, of which a rank of any layout
                                          reads what it needs
    stream_foreign_checkpoint_to_ours     writes an opened folder as a checkpoint of ours, while it is read
    upcycle_to_experts                    writes a dense model as a mixture of experts that computes the same
    read_mxfp4                            weights in MXFP4, which are read as bfloat16
    plan_hf_folder                        plans a Hugging Face folder
    stream_checkpoint_to_hf_folder        writes that of a checkpoint
    gather_ranks_to_hf_folder             writes that of running ranks
    hf_provenance_and_tokenizer_files     records the folder that a model came from, and copies its tokenizer's files
    read_hf_token_to_id                   the tokenizer's vocabulary and its special tokens
    missing_params_and_absent_heads       parameters that a folder or checkpoint does not hold
    families/                             the tables: keys of a config.json, and the tensors of each parameter
    formats/                              file formats of other projects, read without running code in them

Names load on first use. To add a family, write a table of its own and a line in `FAMILIES`; a fork does so before it
calls `pretrain`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.convert.families.hf_family_fields_and_param_mappings import (
        Family as Family,
        ParamMapping as ParamMapping,
    )
    from megatron.convert.families.registry import FAMILIES as FAMILIES
    from megatron.convert.formats.find_megatron_folder import unsupported_format_hint as unsupported_format_hint
    from megatron.convert.open_any_format import (
        is_foreign as is_foreign,
        model_from_hf_config as model_from_hf_config,
        open_any as open_any,
        open_foreign as open_foreign,
        settings_of_foreign_folder as settings_of_foreign_folder,
    )
    from megatron.convert.stream_checkpoint_to_hf_folder import write_hf_folder as write_hf_folder
    from megatron.convert.stream_foreign_checkpoint_to_ours import copy_checkpoint as copy_checkpoint

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".stream_foreign_checkpoint_to_ours": "copy_checkpoint",
        ".families.family": "Family ParamMapping",
        ".families.registry": "FAMILIES",
        ".formats.find_megatron_folder": "unsupported_format_hint",
        ".open_any_format": "model_from_hf_config is_foreign open_any open_foreign settings_of_foreign_folder",
        ".stream_checkpoint_to_hf_folder": "write_hf_folder",
    },
)
