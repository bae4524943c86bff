"""Offload: a rank's state or activations in host memory or in files instead of the device's memory.

optimizer_and_param_offload_config     the settings (no torch)
optimizer_offload_fraction             which elements are offloaded, in which slices (no torch)
host_and_file_stores                   an `OffloadAllocator`: pinned memory, or a file
checksummed_file                       that file, with checksums
offload_folder                         the folder of this rank that has it
activation_offload                     activations of a stage's layers in a store
contiguous_activation_buffer           activations in slots of one device buffer
tensor_in_memory_or_file               one interface to tensors in memory and in files
"""
