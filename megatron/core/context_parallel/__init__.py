"""Context parallelism: attention between the parts of a sequence that ranks hold.

Everything else in a layer works on rows by themselves, and learns of it only through `SequenceRows`.

    cp_comm_type.py         ContextParallel: what a layer is given; METHODS, the table behind --cp-comm-type
    causal_blocks.py         which rows of mine see which keys, block by block. Pure integers
    block_attention.py  a block's attention with log(sum exp), and its backward
    ring_attention.py         attention as a sum over blocks: of keys that travel round the ring, or are gathered
    ulysses.py        heads exchanged for rows: each rank computes whole sequences of some heads
    context_parallel_rules.py       rules about its settings

May import: as the package around it. To add a way to communicate: a `Method` in METHODS.
"""
