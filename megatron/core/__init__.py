"""The parts that training is made of. `mpu` is Megatron's name for `parallel_state`.

    grid, stage_map, boxes, config      pure integers and settings
    mesh, comm, placement, random       which ranks work together, every collective, where a parameter lives, seeded values
    tensor_parallel, pipeline_parallel, distributed, datasets, tokenizers      one mechanism each
    transformer, optimizer, checkpoint  built from the mechanisms
    models, inference, classic          whole models, generation, Megatron's signatures

May import: a package imports from the floors below its own (docs/architecture.md has the picture), and never from training.
To add a package: give it a floor in ROWS of tests/test_architecture.py, and a budget of code lines in BUDGETS.
"""

from importlib import import_module


def __getattr__(name):
    if name == "mpu":
        return import_module("megatron.core.parallel_state")
    if name == "ModelParallelConfig":
        return import_module("megatron.core.model_parallel_config").ModelParallelConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
