"""Memory beside the device's: state or activations of a rank in host memory, or in files.

state_offload_config, offload_fraction           the settings; which elements are offloaded, in which slices (no torch)
offload_tiers                    pinned memory, or a file with checksums (`checksummed_file`) in a folder of this rank
                                       (`offload_folder`)
activation_offload, contiguous_activation_buffer   activations of a stage's layers, on the host or in slots of one device buffer
stored_tensor                          one interface to tensors in memory and in files
"""
