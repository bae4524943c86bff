"""Memory is predicted before a run starts, and measured while it runs.

meta_tensor_mode_and_fake_group           tensors without values, and fake groups in place of the other ranks
dry_run_of_one_rank                       the step of one rank, by the script's own code: what each action adds, and its
                                          peak
forecast_memory_along_schedule            the prediction: the same along the schedule of every pipeline rank
predicted_memory_table                    prints it
params_flops_bytes_by_layer               parameters, FLOPs and bytes of each layer
track_memory_by_kind                      live bytes by kind, as tensors are created and freed;
                                          `log_measured_beside_predicted_memory` prints
                                          them
flags_that_reduce_memory, memory_check    whether it fits devices, hosts and disks
zero_state_bytes_by_tier,                 the bytes on each of them; the free memory of this machine
read_free_host_memory
oom_advice                                the message for a failed allocation, with the flags that take less
"""
