"""Attention kernels, masks and the key/value cache.

kernels            KERNELS, the table behind --attention-backend, and which kernel a case gets
masks              documents, windows, biases: a kernel that computes by them holds no s x s tensor
softcap_and_sinks    soft caps and sinks
sliding_window     torch's fused kernel over blocks of the band
tiled_eager, tiled_compiled, tiles    attention in tiles, with dropout or without
kv_cache           keys and values of generation
"""
