"""The training loop, and the names that top-level scripts import. Their modules are imported on first use.

    training, trainer, step                one run from its command line to its end; its loop; one step
    arguments/, initialize, global_vars    settings; processes; get_args, get_timers, get_tokenizer
    build_model_optimizer_and_data,        model, optimizer and data of this rank
    make_chunks_optimizer_and_pipeline,
    num_samples
    checkpointing/                         saving, loading, resuming
    monitor/, result_checks/               logs and profiles; wrong numbers
    memory/, fault_tolerance/              memory; hangs, signals and errors
    zero_engine_for_any_module             trains any torch module; the script writes the loop

To add a flag: `arguments`; an observer: `monitor`; a phase of a step: `step`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.training.build_model_optimizer_and_data import (
        build_train_valid_test_data_iterators as build_train_valid_test_data_iterators,
        get_model as get_model,
        setup_model_and_optimizer as setup_model_and_optimizer,
    )
    from megatron.training.global_vars import (
        get_args as get_args,
        get_runtime as get_runtime,
        get_timers as get_timers,
        get_tokenizer as get_tokenizer,
        is_last_rank as is_last_rank,
        print_rank_0 as print_rank_0,
        print_rank_last as print_rank_last,
    )
    from megatron.training.initialize import initialize_megatron as initialize_megatron
    from megatron.training.training import pretrain as pretrain, set_startup_timestamps as set_startup_timestamps

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".build_model_optimizer_and_data": "get_model build_train_valid_test_data_iterators setup_model_and_optimizer",
        ".global_vars": "get_args get_runtime get_timers get_tokenizer is_last_rank print_rank_0 print_rank_last",
        ".initialize": "initialize_megatron",
        ".training": "pretrain set_startup_timestamps",
    },
)
