"""Storage: files that appear whole or not at all, the locks of the processes that write them, tensors that need not be in memory.

One process writes, the others wait; it writes under a temporary name and renames, so that nobody ever reads half a file.
The data caches, the checkpoints, the offloaded state and the tools use it. Imports row 0 alone; only `stored` needs torch.
"""
