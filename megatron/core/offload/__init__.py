"""Tiers of memory beside the device's: state or activations of a rank in host memory, or in files.

    host_and_file_store.py, block_file.py, checkpoint_folder.py   the two tiers: pinned memory; a file with checksums, in a folder of this rank's own
    activations.py, activation_slots.py            saved activations on their way out and back; slots of one buffer on the device
    buffer_plan.py, offload_config.py          which elements go where; the flags

May import: floor 0 (`storage`, whose `Stored` its tensors are). Layers, gradient buffers, the optimizer and training import it.
To add a tier: a class with `zeros` and `close` (`Tier`), a `StoredTensor` if its tensors are not torch's, a line in `make_tier`.
"""
