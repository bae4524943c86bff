"""Every package may use these: flags from dataclasses, registries, errors, lazy imports, handles of asynchronous work.

    dataclass_flags                        a command-line flag for each field of a dataclass
    registry_with_checked_entries          tables name -> entry that scripts may extend
    user_error_and_torchrun_error_file     reports of errors; whether the user caused one
    tolerate_broken_output                 standard output and error that may break without ending the run
    rank_status                            phase, iteration and last collective of this rank, in a file in memory that
                                           others can read
    async_handle                           the handle of an asynchronous operation
    global_batch_size_schedule             the global batch size of each step
    lazy_imports                           names and packages that are imported on first use

Nothing here needs torch. May import: the standard library.
"""
