"""A module of Megatron that has no file here is made from the tables; a file and a wrong name are as before."""

from importlib import import_module
from pathlib import Path

import pytest

from megatron.core.base.import_hook_for_megatron_paths import TableModules, listed_modules
from megatron.core.base.moved_or_unbuilt_megatron_names import ELSEWHERE

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
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.post_training"):
        import_module("megatron.post_training.arguments")
