"""The ranks of a job form groups, and send tensors to one another over them.

grid, stage_map, sequence_shard, parallel_config    axes, stages, shards of a sequence, sizes: integers (no torch)
mesh, global_state                                  the axes of this rank, and those of the process, which
                                                    Megatron's functions read
collectives                                         every collective and transfer, recorded in a ledger; no other
                                                    file communicates
initialize_model_parallel, initialize_distributed,  how processes join a job and leave it
launcher_environment
hostfile_to_torchrun, tcp_liveness                  launch commands; which ranks are missing or dead
accelerator                                         the device of the process; the only file that names a vendor
"""
