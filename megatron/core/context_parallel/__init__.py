"""Context parallelism: attention of samples whose rows are sharded over ranks.

    cp_attention                      the inputs of a layer's attention; METHODS, the table behind --cp-comm-type
    causal_blocks                     which rows of this rank see which keys, block by block (no torch)
    block_attention                   attention to a block with the log of its sum of exponentials, and its backward
    ring_and_allgather_attention      a sum over blocks: of keys that travel round the ring, or are gathered first
    ulysses                           all-to-all from rows to heads: each rank computes full sequences of some heads
    cp_prefill_allgather_kv_cache     generation from prompts that ranks share

To add a way to communicate: a `Method` in METHODS.
"""
