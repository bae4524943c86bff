"""A module of Megatron that has no file here is made from the tables; a file and a wrong name are as before."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from megatron.core.base import megatron_core_modules_without_file, megatron_names_outside_core
from megatron.core.base.import_hook_for_megatron_paths import TableModules, listed_modules
from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE, NOT_BUILT, REASONS
from megatron.training.arguments.ignored_and_refused_flags import OTHERS
from megatron.training.arguments.parser import make_parser

COURSE = {
    "megatron.initialize": "initialize_megatron",
    "megatron.model.distributed": "DistributedDataParallel MemoryBuffer",
    "megatron.model.language_model": "Embedding TransformerLanguageModel",
    "megatron.model.transformer": "ParallelAttention ParallelMLP ParallelTransformer ParallelTransformerLayer get_num_layers",
    "megatron.mpu.initialize": (
        "_DATA_PARALLEL_GROUP _EMBEDDING_GROUP _MODEL_PARALLEL_GROUP _PIPELINE_MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GROUP "
        "get_num_layers initialize_model_parallel"
    ),
    "megatron.mpu.layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
    "megatron.mpu": "get_num_layers get_tensor_model_parallel_group",
    "megatron.optimizer": "get_megatron_optimizer",
    "megatron.schedules": "get_forward_backward_func",
}


@pytest.mark.parametrize("module", COURSE)
def test_the_names_of_a_course_are_found(module: str):
    for name in COURSE[module].split():
        assert hasattr(import_module(module), name)


def test_the_page_has_the_modules_and_names_of_a_course():
    page = (Path(__file__).resolve().parents[3] / "docs" / "walkthrough.md").read_text()
    for module, names in COURSE.items():
        missing = [name for name in (module, *names.split()) if f"`{name}`" not in page and f"mpu.{name}`" not in page]
        assert not missing, module
    assert "`_make_param_hook`" in page and hasattr(
        import_module("megatron.model.distributed").DistributedDataParallel, "_make_param_hook"
    )


@pytest.mark.parametrize("module", sorted(ELSEWHERE))
def test_every_name_that_is_elsewhere_is_there(module: str):
    made = import_module(module)
    for home, names in ELSEWHERE[module].items():
        for name in names.split():
            assert getattr(made, name) is getattr(import_module(home), name)


def test_a_file_comes_before_the_tables_and_other_modules_are_missing():
    assert not isinstance(import_module("megatron.core.models").__spec__.loader, TableModules)
    assert isinstance(import_module("megatron.core.models.hybrid.hybrid_model").__spec__.loader, TableModules)
    assert "megatron.core.models.hybrid" in listed_modules()
    with pytest.raises(ImportError, match="cannot import name 'NoEngine'"):
        from megatron.core.inference.engines import NoEngine  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.post_training"):
        import_module("megatron.post_training.arguments")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("megatron.core.inference.engines.StaticInferenceEngine", "tools/generate.py"),
        ("megatron.core.inference.sampling_params.SamplingParams", "tools/generate.py"),
        ("megatron.core.inference.text_generation_server.MegatronServer", "there is no server"),
        ("megatron.core.export.trtllm.trtllm_helper.TRTLLMHelper", "a Hugging Face folder"),
        ("megatron.core.distributed.fsdp.FullyShardedDataParallel", "--zero-stage 3"),
        ("megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard.fully_shard", "--zero-stage 3"),
        ("megatron.core.dist_checkpointing.strategies.torch.TorchDistSaveShardedStrategy", "docs/checkpoint_format.md"),
        ("megatron.core.models.multimodal.llava_model.LLaVAModel", "models of images"),
        ("megatron.core.ssm.mamba_mixer.MambaMixer", "state-space layers"),
        ("megatron.core.transformer.multi_latent_attention.MLASelfAttention", "docs/model_options.md"),
        ("megatron.core.transformer.cuda_graphs.CudaGraphManager", "CUDA graphs"),
        ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", "get_megatron_optimizer"),
        ("megatron.core.pipeline_parallel.p2p_communication.send_forward", "get_forward_backward_func"),
        ("megatron.core.datasets.retro.query.query.query_neighbors", "models of retrieval"),
    ],
)
def test_a_module_of_core_that_is_not_built_says_what_to_use(name: str, instead: str):
    module, _, last = name.rpartition(".")
    with pytest.raises(NotImplementedError, match=rf"^{last}: not built; .*{instead}"):
        getattr(import_module(module), last)()


def test_every_module_of_the_tables_is_imported_and_every_row_of_core_has_a_reason():
    for module in listed_modules():
        assert import_module(module).__name__.startswith("megatron")
    for module in NOT_BUILT:
        around = module
        while around not in REASONS:
            around = around.rpartition(".")[0]
        assert around != "megatron.core" or module == "megatron.core", module


def test_no_row_of_a_table_is_hidden_by_one_of_another():
    for table in (megatron_core_modules_without_file, megatron_names_outside_core):
        for part, joined in (("ELSEWHERE", ELSEWHERE), ("NOT_BUILT", NOT_BUILT), ("REASONS", REASONS)):
            for module, row in getattr(table, part).items():
                assert joined[module] == row, module


def test_the_pages_that_reasons_name_exist():
    root = Path(__file__).resolve().parents[3]
    for reason in REASONS.values():
        for page in re.findall(r"(?:docs|tools)/\w+\.\w+", reason):
            assert (root / page).is_file(), page


def test_the_flags_that_reasons_name_exist():
    known = make_parser().actions_by_flag()
    for reason in REASONS.values():
        for flag in re.findall(r"--[a-z][\w-]*", reason):
            assert flag in known or flag in OTHERS or "tools/" in reason, flag
