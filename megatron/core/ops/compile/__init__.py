"""Code that torch.compile has compiled.

    compiled_region.py     formulas and regions: what `--compile` compiles, what that needs and has cost
    skip_guards.py     later calls of a compiled program, without torch's checks

May import: config, comm, grid, made_again.
To compile more: write a `Region` beside the eager code that it stands for, as `ops/fused_layer_ops.py` has them.
"""
