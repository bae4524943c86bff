"""Storage: atomic files, file locks, and tensors that may live in files.

A writer writes under a temporary name and renames, so that no reader sees an incomplete file. Data caches, checkpoints, offload
and tools use it. It imports only row 0 of docs/architecture.md; only `stored` needs torch.
"""
