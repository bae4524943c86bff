"""Tiers of memory beside the device's: what a rank keeps of its state or activations in memory of the host, or in a file.

    tier.py, block_file.py, folder.py   the two tiers: pinned memory; a file with checksums, in a folder of this rank's own
    activations.py, slots.py            saved activations on their way out and back; slots of one buffer on the device
    plan.py, offload_config.py          which elements go where; the flags

Stands above `core/storage`, whose `Stored` its tensors are; layers, gradient buffers, the optimizer and training import it. A new
tier is a class with `zeros` and `close` (`Tier`), a `StoredTensor` if its tensors are not torch's, and a line in `make_tier`.
"""
