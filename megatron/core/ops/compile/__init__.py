"""torch.compile.

compiled_region    what `--compile` compiles, what that needs and has cost
skip_guards        later calls of a compiled program, without torch's checks
"""
