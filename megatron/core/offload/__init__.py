"""Memory beside the device's: state or activations of a rank in host memory, or in files.

offload_config, offload_plan           the settings; which elements are offloaded, in which slices (no torch)
host_and_file_store                    pinned memory, or a file with checksums (`block_file`) in a folder of this rank
                                       (`offload_folder`)
activation_offload, activation_slots   activations of a stage's layers, on the host or in slots of one device buffer
stored_tensor                          one interface to tensors in memory and in files
"""
