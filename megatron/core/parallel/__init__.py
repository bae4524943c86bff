"""The ranks of a job, the groups they form, and everything they send to one another.

grid, stage_map, sequence_shard, parallel_config    on paper: axes, stages, parts of a sequence, sizes (no torch)
mesh, global_state                                  the axes of this rank, and those of the process, which Megatron's
                                                    functions ask
collectives                                         every collective and transfer, recorded in a ledger; no other file
                                                    communicates
initialize_groups, rendezvous, launcher_environment, hostfile, liveness    how processes meet, leave, and miss one another
device                                              the device of the process; the only file that names a vendor
"""
