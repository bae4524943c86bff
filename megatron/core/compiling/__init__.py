"""Code that torch.compile has compiled.

    compiler.py     formulas and regions: what `--compile` compiles, what that needs and has cost
    replayed.py     later calls of a compiled program, without torch's checks

May import: config, comm, grid, made_again.
To compile more: write a `Region` beside the eager code that it stands for, as `transformer/regions.py` has them.
"""
