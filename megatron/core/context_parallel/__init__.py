"""Context parallelism: attention between the parts of a sequence that ranks hold.

    cp_attention      what a layer is given; METHODS, the table behind --cp-comm-type
    causal_blocks     which rows of this rank see which keys, block by block (no torch)
    block_attention   attention to a block with the log of its sum of exponentials, and its backward
    ring_attention    a sum over blocks: of keys that travel round the ring, or are gathered first
    ulysses           heads exchanged for rows: each rank computes whole sequences of some heads
    cp_prefill_cache  generation from prompts that ranks share

To add a way to communicate: a `Method` in METHODS.
"""
