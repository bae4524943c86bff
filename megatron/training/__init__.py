"""The training loop, and the names that top-level scripts import. They load on first use.

    training, trainer, step                     a run from its command line to its end; its loop; one step
    arguments/, initialize, global_vars         settings; processes; what get_args and its like read
    build, model_chunks, num_samples            model, optimizer and data of this rank
    checkpointing/                              saving, loading, resuming
    monitor/, rerun/, memory/, fault_tolerance/ logs and profiles; wrong numbers; memory; hangs, signals and errors
    engine                                      any torch module trained by a loop of one's own

To add a flag: `arguments`; an observer: `monitor`; a phase of a step: `step`.
"""

from megatron.core.base.lazy_imports import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".build": "get_model build_train_valid_test_data_iterators setup_model_and_optimizer",
        ".global_vars": "get_args get_runtime get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last",
        ".initialize": "initialize_megatron",
        ".training": "pretrain",
    },
)
