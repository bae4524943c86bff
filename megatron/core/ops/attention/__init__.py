"""Kernels of attention that are ours: rows of the table in `attention/kernels.py`.

    tiles.py               tiles of scores, which stay in the cache
    tiled_compiled.py     causal attention in tiles, with compiled formulas
    tiled_eager.py         attention under any mask in tiles, by torch's operations
    sliding_window.py                torch's fused kernel on the blocks of a sliding window

May import: masks and scoring beside it, compiling.
To add a kernel: a file with its function, and a line of KERNELS.
"""
