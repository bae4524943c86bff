"""What every package may use: flags declared by dataclasses, registries, errors, lazy imports, handles of asynchronous work.

    dataclass_flags     a command-line flag for each field of a dataclass
    registry            open tables: name -> entry, which scripts may extend
    errors              reports of errors; whose fault one is
    output_streams      standard output and error that may break without ending the run
    rank_status         where this rank is: phase, iteration, last collective, in a page that others can read
    async_handle        the handle of an asynchronous operation
    batch_size_schedule          the global batch size of each step
    lazy_imports        names and packages that are imported on first use

Nothing here needs torch. May import: the standard library.
"""
