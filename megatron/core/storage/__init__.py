"""What the house keeps on disk: files that appear whole or not at all, and the locks of the processes that write them.

One process writes, the others wait; it writes under a temporary name and renames, so that nobody ever reads half a file.
The data caches, the checkpoints, the offloaded state and the tools use it. Imports nothing of the house; no torch.
"""
