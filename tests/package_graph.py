"""The graph of packages: declared in levels, read from the imports of every file, and refused where it has a cycle.

    python tests/package_graph.py            the levels with what each package imports
    python tests/package_graph.py --files    every import that crosses two packages

A package imports from lower levels alone; what two packages of a level share lies lower. `renamed_modules.json` (old module -> new)
places files that are still to be moved where they will be, so that the graph is acyclic on paper before anything is moved.
"""

import argparse
import ast
import json
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RENAMED = Path(__file__).with_name("renamed_modules.json")

# Each level may import those above it in this list. A name with one dot is a package or a loose file of core or training.
LEVELS = (
    "core.base core.package_info core.inference_params",
    "core.enums core.packed_seq_params core.model_parallel_config",
    "core.storage core.parallel core.tokenizers",
    "core.sharding core.parallel_state core.process_groups_config core.timers core.num_microbatches_calculator",
    "core.ops core.offload core.datasets core.utils core.rerun_state_machine",
    "core.tensor_parallel core.context_parallel core.dist_checkpointing core.distributed",
    "core.pipeline_parallel core.peft",
    "core.transformer core.optimizer",
    "core.models core.fusions core.extensions core.optimizer_param_scheduler convert",
    "core.inference",
    "evaluation",
    "training.model_flops_of_unbuilt_layouts training.rewindable_batches training.tokenizer training.named_and_padded_validation_sets training.datasets "
    "training.inprocess_restart",
    "training.step",
    "training.arguments",
    "training.yaml_arguments",
    "training.global_vars training.evaluate_window_chosen_by_iteration training.eval_tasks_during_training",
    "training.batch_utils training.make_chunks_optimizer_and_pipeline training.checkpointing",
    "training.zero_engine_for_any_module training.utils training.num_samples training.memory training.monitor training.result_checks",
    "training.fault_tolerance",
    "training.initialize",
    "training.argument_utils",
    "training.build_model_optimizer_and_data",
    "training.trainer",
    "training.training",
    "legacy deepspeed report console_scripts",
    "porting",
    "on_cpu doctor configure arguments data model mpu tokenizer utils __main__",
)


def package_of(module: str) -> str:
    """megatron.core.ops.attention.document_and_window_masks -> core.ops"""
    parts = module.split(".")
    if parts[1] in ("core", "training"):
        return ".".join(parts[1:3])
    return parts[1]


@cache
def modules() -> dict[str, Path]:
    """The modules of the product, without the packages themselves: an `__init__` names what others define, and loads it lazily."""
    files = sorted((ROOT / "megatron").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files if file.stem != "__init__"}


def imported_by(file: Path) -> set[str]:
    """The modules of ours that a file imports when it is loaded; not those that only a type checker sees."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    unseen = set()
    for node in nodes:
        if isinstance(node, ast.If) and any(
            "TYPE_CHECKING" in (getattr(part, "id", None), getattr(part, "attr", None)) for part in ast.walk(node.test)
        ):
            unseen |= {id(inner) for inner in ast.walk(node)}
    names = set()
    for node in nodes:
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names & modules().keys()


@cache
def renamed() -> dict[str, str]:
    return json.loads(RENAMED.read_text()) if RENAMED.exists() else {}


@cache
def edges() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """(package, package that it imports) -> the modules that do, both where they will be."""
    found = defaultdict(list)
    for module, file in modules().items():
        own = renamed().get(module, module)
        for other in sorted(imported_by(file)):
            other = renamed().get(other, other)
            if package_of(own) != package_of(other):
                found[package_of(own), package_of(other)].append((own, other))
    return dict(found)


def level_of(package: str) -> int:
    for level, packages in enumerate(LEVELS):
        if package in packages.split():
            return level
    raise LookupError(
        f"megatron/{package.replace('.', '/')} has no level; give it one in LEVELS of tests/package_graph.py"
    )


def problems() -> list[str]:
    """Imports that do not point to a lower level, and homes that two modules would share."""
    found = []
    for (package, other), imports in sorted(edges().items()):
        if level_of(other) >= level_of(package):
            found += [
                f"{one} (level {level_of(package)}) imports {another} (level {level_of(other)})"
                for one, another in imports
            ]
    homes = defaultdict(list)
    for module in modules():
        homes[renamed().get(module, module)].append(module)
    found += [f"{home} is the home of {' and '.join(of)}" for home, of in sorted(homes.items()) if len(of) > 1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="print every import that crosses two packages")
    if parser.parse_args().files:
        for imports in edges().values():
            for one, other in imports:
                print(f"{one} -> {other}")
    for level, packages in enumerate(LEVELS):
        for package in packages.split():
            below = sorted(other for own, other in edges() if own == package)
            print(f"{level:2} {package:28} {' '.join(below)}")
    if wrong := problems():
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
