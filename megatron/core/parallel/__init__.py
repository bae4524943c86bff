"""The ranks of a job, the groups they form, and everything they send to one another.

grid, stage_map, sequence_shard, parallel_config    on paper: axes, stages, parts of a sequence, sizes (no torch)
mesh, global_state                                  the axes of this rank, and those of the process, which Megatron's
                                                    functions ask
collectives                                         every collective and transfer, recorded in a ledger; no other file
                                                    communicates
initialize_model_parallel, initialize_distributed, launcher_environment    how processes join a job and leave it
hostfile_to_torchrun, tcp_liveness    launch commands; which ranks are missing or dead
device                                              the device of the process; the only file that names a vendor
"""
