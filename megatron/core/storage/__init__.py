"""Storage: files that appear whole or not at all, the locks of their writers, tensors that need not be in memory.

One process writes, the others wait. The writer renames a temporary file, so nobody reads half a file. Only `stored` needs torch.
`files` is the layer under checkpoints, which may lie in an object store: `paths` reads its URL, `objects` is it.

May import: floor 0. The data caches, the checkpoints, the offloaded state and the tools import it.
To add a kind of tensor outside memory: a `StoredTensor`.
"""
