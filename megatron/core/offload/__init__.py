"""Offload: a rank's state or activations in host memory or in files instead of the device's memory.

state_offload_config, offload_fraction           the settings; which elements are offloaded, in which slices (no torch)
offload_tiers                    an `OffloadStore`: pinned memory, or a file with checksums (`checksummed_file`) in a folder of
                                       this rank (`offload_folder`)
activation_offload, contiguous_activation_buffer   activations of a stage's layers, in a store or in slots of one device buffer
stored_tensor                          one interface to tensors in memory and in files
"""
