"""Attention kernels, masks and the key/value cache.

kernels                                           KERNELS, the table behind --attention-backend, and which kernel a case
                                                  gets
document_and_window_masks                         documents, windows, biases: a kernel that computes by them holds no s
                                                  x s tensor
softcap_and_sinks                                 soft caps and sinks
sliding_window_sdpa                               torch's fused kernel over blocks of the band
query_tiled_eager, query_tiled_causal_compiled    attention in tiles, with dropout or without
query_tiles                                       the tiles of the scores
kv_cache                                          keys and values of generation
"""
