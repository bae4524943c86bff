"""Exchange with other projects, as data: their folders read as they lie, and written back, by one table of rows a family.

    families/                          tables of model families: what a config.json says, where each tensor lies
    formats/                           what lies in other projects' files, read without running it
    strided_ranges.py, mapped*.py, torchtitan_folder.py, detect_format.py    a folder as a checkpoint that any layout reads
    import_checkpoint.py                          ... and as one of ours, written while it is read
    export_plan.py, export_offline.py, export_distributed.py    a model as a Hugging Face folder: the plan; of a checkpoint; of running ranks
    aux_files.py, tokenizer_config.py    what goes along: ids of a text's ends, the tokenizer's files

May import: floors 0 to 3 (`checkpoint`, `transformer.model_config`). Names load on first use.
To add a family: a table of its own, and a line in `FAMILIES`; a fork does it before it calls `pretrain`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".import_checkpoint": "copy_checkpoint",
        ".families.family": "Family Row",
        ".families.known": "FAMILIES",
        ".formats.megatron_folder": "unreadable",
        ".detect_format": "described_by is_foreign open_any open_foreign settings_in",
        ".export_offline": "write_hf_folder",
    },
)
