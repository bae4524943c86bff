"""Models of other projects as data: their folders read as they lie, and written back, by one table of rows a family.

    families/                      tables of model families: what a config.json says, where each tensor lies
    formats/                       what lies in other projects' files, read without running it
    open_any_format                  which project a folder is of; hf_reader, megatron_reader, torchtitan_reader open it
    strided_checkpoint                 tensors as byte ranges, which any layout reads
    import_checkpoint              a folder as a checkpoint of ours, written while it is read
    export_plan, export_checkpoint, export_distributed    a model as a Hugging Face folder: the plan; of a checkpoint; of
                                                       running ranks
    hf_origin, hf_tokenizer_config, hf_tokenizer_vocab      what goes along: the tokenizer's files, ids of a text's ends

Names load on first use. To add a family: a table of its own, and a line in `FAMILIES`; a fork does it before it calls
`pretrain`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.convert.export_checkpoint import write_hf_folder as write_hf_folder
    from megatron.convert.families.family import Family as Family, Row as Row
    from megatron.convert.families.registry import FAMILIES as FAMILIES
    from megatron.convert.formats.find_megatron_folder import unreadable as unreadable
    from megatron.convert.import_checkpoint import copy_checkpoint as copy_checkpoint
    from megatron.convert.open_any_format import (
        described_by as described_by,
        is_foreign as is_foreign,
        open_any as open_any,
        open_foreign as open_foreign,
        settings_in as settings_in,
    )

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".import_checkpoint": "copy_checkpoint",
        ".families.family": "Family Row",
        ".families.registry": "FAMILIES",
        ".formats.find_megatron_folder": "unreadable",
        ".open_any_format": "described_by is_foreign open_any open_foreign settings_in",
        ".export_checkpoint": "write_hf_folder",
    },
)
