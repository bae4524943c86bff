"""The shape of the code base, checked: who may import whom, who may communicate, who may name a vendor, how long things are."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import package_graph
import pytest
from code_lines import code_lines, nodes, product_files, tree

ROOT = Path(__file__).parent.parent
CORE = ROOT / "megatron" / "core"
PYTHON_FILES = sorted(p for folder in ("megatron", "tools", "examples", "tests") for p in (ROOT / folder).rglob("*.py"))
PYTHON_FILES += sorted(ROOT.glob("*.py"))
PRODUCT_FILES = [p for p in PYTHON_FILES if "tests" not in p.relative_to(ROOT).parts]

# Files that load without torch, so that tools and tests of plain integers start at once.
PURE = """
    core.parallel.rank_grid core.parallel.zigzag_sequence_row_ranges core.sharding.boxes core.sharding.placement
    core.base.dataclass_flags core.base.global_batch_size_schedule core.parallel.launcher_environment core.parallel.detect_lost_ranks_by_tcp
    core.base.user_error_and_torchrun_error_file core.parallel.parallel_config core.parallel.parse_pipeline_layout_string core.parallel.stage_to_rank core.base.registry_with_checked_entries
    core.storage.atomic_file core.storage.file_layer core.storage.fsspec_object_store core.storage.path_or_url
    core.distributed.data_parallel_config core.distributed.buffer_plan core.distributed.zero_stage_comm_volume
    core.distributed.grad_count core.offload.optimizer_offload_fraction core.offload.checksummed_file core.offload.offload_folder
    core.optimizer.lr_wd_schedule_by_samples core.optimizer.loss_scaler core.optimizer.optimizer_flags_and_registry
    core.optimizer.muon_config core.optimizer.matrix_owners core.optimizer.param_groups
    core.dist_checkpointing.checkpoint_folder core.dist_checkpointing.object_store_commit
    core.dist_checkpointing.publish_by_rename_and_cleanup core.dist_checkpointing.manifest_format core.dist_checkpointing.write_and_publish
    core.dist_checkpointing.writer_process core.pipeline_parallel.schedule.actions
    core.pipeline_parallel.schedule.gpipe_1f1b_zb_h1
    core.pipeline_parallel.schedule.registry core.pipeline_parallel.schedule.zb_v
    core.pipeline_parallel.schedule.lower core.pipeline_parallel.schedule.simulate
    core.pipeline_parallel.layer_split core.pipeline_parallel.schedule.plot core.datasets.index_map
    training.arguments.nan_spike_and_corruption_config training.monitor.cpu_contention training.model_flops_of_unbuilt_layouts training.monitor.long_task_progress
    convert.formats.safetensors_header convert.formats.hf_config_and_safetensors_headers convert.families.strided_views_of_hf_weights
    convert.families.config_fields convert.formats.pickle_as_data convert.formats.torch_save_tensor_offsets
    convert.formats.read_megatron_args convert.formats.megatron_param_names_and_shard_joins convert.formats.find_megatron_folder
    convert.formats.locate_megatron_torch_tensors convert.formats.locate_megatron_torch_dist_tensors convert.formats.read_torch_dcp_metadata
    convert.formats.note_unknown_megatron_args core.base.rank_status core.base.tolerate_broken_output core.base.label_allocations_by_memory_kind
"""


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Everything in a file."""
    return nodes(path.read_text())


@cache
def imported_modules(path: Path) -> list[str]:
    """Absolute names of everything that a file imports, wherever in the file."""
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the package's name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_packages_import_from_lower_levels_alone():
    """`tests/package_graph.py` declares the levels, and where files that are still to be moved will be."""
    assert not package_graph.problems()


def test_every_level_names_what_exists():
    """Or what a pending move will make."""
    targets = set(package_graph.renamed().values())
    for package in " ".join(package_graph.LEVELS).split():
        path = ROOT / "megatron" / package.replace(".", "/")
        moved = any(f"{target}.".startswith(f"megatron.{package}.") for target in targets)
        assert moved or package == "legacy" or path.is_dir() or path.with_suffix(".py").is_file(), package


def test_core_imports_nothing_around_it():
    for package, other in package_graph.edges():
        assert not package.startswith("core.") or other.startswith("core."), (package, other)


def test_no_imports_in_a_circle():
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PRODUCT_FILES}
    graph = {
        name: {m for n in imported_modules(path) for m in (n, n.rpartition(".")[0]) if m in modules and m != name}
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


# Lines of core that treat the meta device apart, as any torch module may. Nothing in core asks whether its memory is predicted.
META_DEVICE = {
    "sharding/initial_values.py": "initial values: a model made on the meta device has none",
    "tensor_parallel/linear_layers.py": "the same, of a table that two stages share",
    "inference/load_model.py": "a model made on the meta device, to compare names and shapes with a checkpoint's",
    "ops/compile/compiled_region.py": "a compiled program has results and nothing in between; torch compiles none for the meta device",
    "ops/cblas_gemm_bf16bf16f32.py": "called by its address, it needs what torch's operators have for the meta device",
    "tensor_parallel/linear_autograd.py": "a product is chosen by trying it, and there are no values to try with",
    "offload/contiguous_activation_buffer.py": "torch cuts no storage of the meta device",
}


def test_nothing_in_core_asks_whether_its_memory_is_predicted():
    asking = re.compile(r"\bis_meta\b|[\"']meta[\"']|stand_ins|ShapesOnly|FakeGroup|is_dry_run|dry.run")
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        if lines := [line.strip() for line in path.read_text().splitlines() if asking.search(line)]:
            found[path.relative_to(CORE).as_posix()] = lines
    assert {path: len(lines) for path, lines in found.items()} == dict.fromkeys(META_DEVICE, 1), found


PREDICTION = "megatron.training.memory"


def test_core_does_not_know_of_the_prediction_of_memory():
    """Neither by import, through any other module, nor by a text that names it."""
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in PRODUCT_FILES}
    reached, to_visit = set[str](), [name for name in modules if name.startswith("megatron.core")]
    while to_visit:
        if (name := to_visit.pop()) not in reached:
            reached.add(name)
            to_visit += [m for n in imported_modules(modules[name]) for m in (n, n.rpartition(".")[0]) if m in modules]
    assert not [name for name in reached if name.startswith(PREDICTION)]
    for path in sorted(CORE.rglob("*.py")):
        assert not re.search("training[./]memory", path.read_text()), path


BLOCKED = f"""
import sys
import pytest
import torch

sys.path[:0] = ["{ROOT}", "{ROOT / "tests/support"}", "{ROOT / "tests/campaigns"}"]
torch.set_num_threads(1)

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "{PREDICTION}" or name.startswith("{PREDICTION}."):
            raise ModuleNotFoundError(name + " is removed", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import {PREDICTION}.track_memory_by_kind
except ModuleNotFoundError:
    sys.exit(pytest.main(["-x", "--noconftest", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
OF_CORE = (  # some of core's tests
    "tensor_parallel/test_layers pipeline_parallel/test_executor parallel/test_axes ops/test_dropout_masks ops/test_tiled_eager "
    "distributed/test_use_order"
)


@pytest.mark.full
def test_core_passes_its_tests_where_the_prediction_of_memory_is_removed():
    files = [f"tests/ranks/{name}.py" for name in OF_CORE.split()]
    outcome = subprocess.run(
        [sys.executable, "-c", BLOCKED, *files], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert outcome.returncode == 0 and " passed" in outcome.stdout, outcome.stdout[-3000:] + outcome.stderr


# Not for this project's code: it replaces, in torch, what a script of others asks of CUDA and NCCL, and must name it.
ON_CPU = ROOT / "megatron" / "porting" / "map_cuda_to_cpu.py"
MEETING = [
    CORE / "parallel" / "init_and_destroy_distributed.py",
    CORE / "parallel" / "initialize_model_parallel.py",
]  # where processes meet and groups are made


def test_torch_distributed_is_known_where_processes_meet_and_communicate_only():
    peers = set((ROOT / "tools/benchmarking/peers").glob("*.py"))  # other code, against which ours is measured
    # the tool writes torch's distributed checkpoints by torch's own writer, in one process without a group;
    # the calls of deepspeed.comm are those of a script, which it hands to torch
    allowed = {
        CORE / "parallel" / "collectives.py",
        *MEETING,
        *peers,
        ROOT / "tools/checkpoint_convert.py",
        ROOT / "megatron/deepspeed/comm.py",
        ON_CPU,
    }
    for path in PRODUCT_FILES:
        if path in allowed:
            continue
        assert not any(n.startswith("torch.distributed") for n in imported_modules(path)), path
        assert not re.search(r"torch\.distributed\.\w+\(", path.read_text()), path


def test_collectives_alone_communicate_and_create_no_groups():
    moves = {
        "all_reduce",
        "all_gather",
        "broadcast",
        "send",
        "recv",
        "isend",
        "irecv",
        "barrier",
        "reduce_scatter_tensor",
    }
    for path in MEETING:
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                assert node.attr not in moves, f"{path.name} communicates: dist.{node.attr}"
    assert "new_group" not in (CORE / "parallel" / "collectives.py").read_text()


def test_only_device_names_a_vendor():
    beside_it = (
        CORE / "parallel" / "device_and_process_group_config.py"
    )  # the values of --device, for --help, which imports no torch
    for path in PRODUCT_FILES:
        if path in (CORE / "parallel" / "accelerator.py", beside_it, ON_CPU):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr not in ("cuda", "npu", "xpu"), f"{path}:{node.lineno} uses torch.{node.attr}"
            if isinstance(node, ast.Constant) and node.value in ("cuda", "npu", "xpu"):
                raise AssertionError(f"{path}:{node.lineno} names the vendor {node.value!r}; ask Device")


def test_imports_stand_at_the_top_of_product_files():
    optional = {"tokenizers", "yaml", "matplotlib", "tqdm", "tensorboard", "wandb", "transformers"}
    optional |= {"sentencepiece"}  # required, but loaded only where it is used
    optional |= {"zstandard", "pyarrow", "nltk"}  # the extras of setup.py
    optional |= {"fsspec"}  # comes with torch, and is loaded where a URL is given
    for path in PRODUCT_FILES:
        for function in (n for n in nodes_of(path) if isinstance(n, ast.FunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                    assert {n.split(".")[0] for n in names} <= optional, (
                        f"{path}:{node.lineno} imports inside a function"
                    )


def test_where_a_gradient_is_summed_is_asked_of_the_mesh():
    """By `samples`, `tokens` and `grad_axes`: the axes behind them are known where grids become a mesh, and by Megatron's accessors."""
    by_name = {CORE / "process_groups_config.py"}  # Megatron's fields of groups bear these names
    for path in sorted(
        {*PRODUCT_FILES} - {CORE / "parallel" / "mesh.py", CORE / "parallel" / "rank_grid.py"} - by_name
    ):
        text = path.read_text()
        assert not re.search(r"\b(e?dp_inner|e?dp_outer|dp_cp)\b", text), path
        assert not re.search(r"""\[["']e?dp["']\]""", text) or "benchmarks" in path.parts, path


# What asks the current mesh in the packages of layers: functions and classes with Megatron's arguments, which carry no mesh.
ASKS_THE_PROCESS = {
    "models/T5/t5_model.py": "T5Model",
    "models/common/embeddings/rotary_pos_embedding.py": "RotaryEmbedding",
    "models/common/megatron_core_model_base.py": "MegatronCoreModel",
    "tensor_parallel/batch_on_this_rank.py": "get_batch_on_this_tp_rank get_batch_on_this_cp_rank",
    "tensor_parallel/cross_entropy.py": "vocab_parallel_cross_entropy",
    "tensor_parallel/data.py": "broadcast_data",
    "tensor_parallel/linear_layers.py": "tensor_parallel_of",
    "tensor_parallel/mappings.py": "axis_of",
    "tensor_parallel/random.py": "CudaRNGStatesTracker get_cuda_rng_tracker _TrackerOfProcess _add_states checkpoint",
    "transformer/module.py": "settings_of context_of mesh_of_process",
    "transformer/moe/megatron_aux_losses_tracker.py": (
        "get_moe_layer_wise_logging_tracker reduce_aux_losses_tracker_across_ranks track_moe_metrics"
    ),
    "transformer/moe/megatron_routing_functions.py": "get_updated_expert_bias",
    "transformer/transformer_layer.py": "layers_of_stage",
}


def test_layers_of_ours_never_ask_the_current_mesh():
    """A layer is handed its axes (`LayerContext`, `TensorParallel`); only Megatron's constructors look them up."""
    asking = {}
    for folder in ("context_parallel", "models", "ops", "tensor_parallel", "transformer"):
        for path in sorted((CORE / folder).rglob("*.py")):
            state = [
                name for name in imported_modules(path) if re.search(r"global_state|parallel_state|core[.]mpu", name)
            ]
            names = {name.rpartition(".")[2] for name in state}
            definitions = [
                node.name
                for node in tree(path.read_text()).body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                and names & {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            ]
            if state:
                asking[path.relative_to(CORE).as_posix()] = " ".join(definitions)
    assert asking == ASKS_THE_PROCESS


def test_training_knows_no_model():
    """It trains what a script's provider returns, by what the model declares: rules, boundary, model_name, gives_hidden_states."""
    known = {
        "megatron.core.models.common.model_rules",
        "megatron.core.transformer.layer_parallel_context",
        "megatron.core.transformer.context_parallel_setting_problems",
        "megatron.core.ops.attention.document_and_window_masks",  # what a batch hides from its queries
        "megatron.core.transformer.model_config",
    }
    for path in sorted((ROOT / "megatron" / "training").rglob("*.py")):
        for name in (
            imported_modules(path) if path.name not in ("__init__.py", "transformer_config_from_args.py") else ()
        ):
            if name.startswith(("megatron.core.models.", "megatron.core.transformer.")):
                assert name.rpartition(".")[0] in known, f"{path.relative_to(ROOT)} imports {name}"


def test_no_memory_waits_for_a_stream():
    """A buffer is freed on the stream that allocated it, so that a run needs the same memory each time."""
    for path in PRODUCT_FILES:
        assert path == ON_CPU or "record_stream" not in path.read_text(), path


def test_no_pickle():
    for path in PRODUCT_FILES:
        assert not {"pickle", "dill", "cloudpickle", "marshal"} & {n.split(".")[0] for n in imported_modules(path)}, (
            path
        )
        assert not re.search(r"torch\.(load|save)\(|allow_pickle=True", path.read_text()), path


def test_pure_modules_load_without_torch():
    """Each after those before it, in one process: the first that loads torch is named."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name); assert 'torch' not in sys.modules, name"
    outcome = subprocess.run(
        [sys.executable, "-c", code, *(f"megatron.{name}" for name in PURE.split())],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr


def is_import_path(path: Path, *projects: str) -> bool:
    """Whether a file is one of Megatron's or DeepSpeed's import paths, with names that are defined elsewhere."""
    told = ast.get_docstring(tree(path.read_text())) or ""
    return told.startswith(tuple(f"Import path of {project}" for project in projects or ("Megatron", "DeepSpeed")))


def test_an_import_path_holds_nothing_but_names():
    for path in filter(is_import_path, PRODUCT_FILES):
        _, *rest = tree(path.read_text()).body
        for node in rest:
            calls = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            is_table = calls and node.value.func.id in ("lazy_names", "all_names", "not_built", "names_of_megatron")
            lists = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__"
            for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            only_names = isinstance(node, ast.Import | ast.ImportFrom) or is_table or lists or for_checkers
            assert only_names, f"{path}: line {node.lineno}"


@pytest.mark.parametrize(
    "folder",
    [path for path in sorted((ROOT / "megatron").rglob("__init__.py")) if not is_import_path(path)],
    ids=lambda path: path.parent.name,
)
def test_a_package_says_what_lives_in_it(folder: Path):
    assert ast.get_docstring(tree(folder.read_text())), folder


def test_no_line_of_the_product_is_wider_than_a_screen():
    """Code has 120 columns by the formatter; strings and comments may have ten more."""
    wide = [
        (path, i)
        for path in product_files()
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 130
    ]
    assert not wide


def test_the_formatter_alone_lays_the_code_out():
    """So that lines of code can be counted as they stand, and none is made shorter by hand."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings["line-length"] == 120 and settings["format"] == {"skip-magic-trailing-comma": True}
    assert not [path for path in PYTHON_FILES if re.search("# fmt[:]", path.read_text())]


def test_lines_of_code_are_neither_comments_docstrings_nor_blank():
    text = '"""Doc."""\n\nx = 1  # why\n# why not\ny = """a\n\nb"""\n\n\ndef f():\n    """It."""\n    return (\n        x\n    )\n'
    assert sorted(code_lines(text)) == [3, 5, 6, 7, 10, 12, 13, 14]


def test_few_files_have_a_part_in_a_parameter():
    """`python tests/campaigns/entered_files.py --names` lists them."""
    from entered_files import MADE, PLACED, entered

    files = entered()
    assert len(files[MADE]) <= 25, files[MADE]
    assert len(files[PLACED]) <= 25, files[PLACED]


# What computes the rank of a stage, its chunk, or where the ends are, in the formatter's spacing.
_OF_PP = r"(?:\bpp|\[\"pp\"\])\."
_RANKS = r"(?:p|num_ranks|[\w.]*pipeline_model_parallel_size|[\w.]*(?:\bpp|\[\"pp\"\])\.size)\b"
PLACES_STAGES = re.compile(
    rf"\* {_RANKS}\)? \+ \(?[\w.\[\]\"]*rank|rank\)? \+ \(?[\w.\[\]\"]+ \* {_RANKS}|\b(?:p|num_ranks|pp\.size) \* \w+\)? \+ \(?[\w.]*rank"
    rf"|stage\w*\)? (?:%|//) {_RANKS}|range\([\w.\[\]\"]*rank, [^()\n]*, {_RANKS}\)|rank(?: [+-] 1\))? % {_RANKS}"
    rf"|{_OF_PP}(?:is_first|is_last|size - 1|rank == (?:0\b|{_RANKS} - 1))|loop_placement"
)


def test_one_file_says_which_rank_runs_a_stage():
    """core/parallel/stage_to_rank.py: everything else asks a `StageMap`, which a schedule may lay out as it likes."""
    for path in PRODUCT_FILES:
        if path != CORE / "parallel" / "stage_to_rank.py":
            found = PLACES_STAGES.search(path.read_text())
            assert found is None, f"{path.relative_to(ROOT)}: {found.group()!r} is for a StageMap to say"


def test_arithmetic_of_stages_is_recognised():
    computed = """chunk * p + rank; chunk * pp.size + pp.rank; (vp or 0) * mesh["pp"].size + mesh["pp"].rank; rank + chunk * p
        p * chunk + rank; stage % p; (last_stage) // pp.size; action.stage // self.mesh["pp"].size; range(pp.rank, n, pp.size)
        mesh["pp"].is_last; pp.is_first; pp.rank == 0; pp.rank == pp.size - 1; (pp.rank + 1) % pp.size; loop_placement(p)"""
    for text in (one.strip() for line in computed.splitlines() for one in line.split("; ")):
        assert PLACES_STAGES.search(text), text
    for text in ("m % p", "2 * (p - rank - 1) + (v - 1) * p + 1", "stages.of_rank(pp.rank)", 'mesh["tp"].is_first'):
        assert not PLACES_STAGES.search(text), text
