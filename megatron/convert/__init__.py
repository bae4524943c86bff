"""Models of other projects as data: their folders read as they lie, and written back, by one table of rows a family.

    families/                      tables of model families: what a config.json says, where each tensor lies
    formats/                       what lies in other projects' files, read without running it
    detect_format                  which project a folder is of; hf_reader, megatron_reader, torchtitan_reader open it
    strided_ranges                 tensors as byte ranges, which any layout reads
    import_checkpoint              a folder as a checkpoint of ours, written while it is read
    export_plan, export_offline, export_distributed    a model as a Hugging Face folder: the plan; of a checkpoint; of
                                                       running ranks
    aux_files, hf_tokenizer_config, hf_vocabulary      what goes along: the tokenizer's files, ids of a text's ends

Names load on first use. To add a family: a table of its own, and a line in `FAMILIES`; a fork does it before it calls
`pretrain`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".import_checkpoint": "copy_checkpoint",
        ".families.family": "Family Row",
        ".families.registry": "FAMILIES",
        ".formats.megatron_folder": "unreadable",
        ".detect_format": "described_by is_foreign open_any open_foreign settings_in",
        ".export_offline": "write_hf_folder",
    },
)
