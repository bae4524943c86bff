"""The ranks of a job form groups, and send tensors to one another over them.

rank_grid, stage_to_rank,                         axes, stages, shards of a sequence, sizes: integers (no torch)
zigzag_sequence_row_ranges, parallel_config,
parse_pipeline_layout_string
mesh, global_state                                the axes of this rank, and those of the process, which Megatron's
                                                  functions read
collectives                                       every collective and transfer, recorded in a ledger; no other file
                                                  communicates
initialize_model_parallel,                        how processes join a job and leave it
init_and_destroy_distributed,
launcher_environment
hostfile_to_torchrun, detect_lost_ranks_by_tcp    launch commands; which ranks are missing or dead
accelerator                                       the device; no file but this and device_and_process_group_config names a vendor
"""
