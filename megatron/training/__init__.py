"""The training loop, and the names that top-level scripts import. They load on first use.

    training, trainer, train_step      a run, its loop, one step
    command_line, initialize, runtime  command line; processes; the parts of a run
    build, chunks, samples             model, optimizer and data of this rank
    checkpointing, resume              a run on disk, and how it continues
    settings, watch, memory, ending    rules between settings; observers; memory; reasons to stop

May import: core. Nothing in core imports it.
To add a flag: `settings`; an observer: `watch`; a phase of a step: `train_step`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".build": "build_train_valid_test_data_iterators setup_model_and_optimizer",
        ".classic.building": "get_model",
        ".global_vars": "get_args get_runtime get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last",
        ".initialize": "initialize_megatron",
        ".training": "pretrain",
    },
)
