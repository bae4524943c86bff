"""A new axis touches few files: docs/architecture.md lists, with reasons, those that name context parallelism outside its own."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"context[-_ ]?parallel|(\b|_)cp(\b|_)", re.IGNORECASE)
OWN = (
    "core/context_parallel/",
    "core/transformer/context_parallel_setting_problems.py",
    "core/parallel/zigzag_sequence_row_ranges.py",
    "core/parallel/parallel_config.py",
)
# Files of Megatron's and DeepSpeed's names and fields.
ROOMS = (
    "core/__init__.py",
    "core/base/megatron_core_modules_without_file.py",
    "core/base/moved_or_unbuilt_megatron_names.py",
    "core/datasets/blended_megatron_dataset_config.py",
    "core/datasets/gpt_dataset.py",
    "core/dist_checkpointing/mapping.py",
    "core/model_parallel_config.py",
    "core/models/common/embeddings/rotary_pos_embedding.py",
    "core/packed_seq_params.py",
    "core/tensor_parallel/batch_on_this_rank.py",
    "core/parallel_state.py",
    "core/process_groups_config.py",
    "core/transformer/moe/megatron_routing_functions.py",
    "core/transformer/transformer_config.py",
    "core/utils.py",
    "legacy/",
    "deepspeed/",
)
MOST = 12


def files_that_name_it() -> set[str]:
    paths = ((path, path.relative_to(ROOT / "megatron").as_posix()) for path in (ROOT / "megatron").rglob("*.py"))
    return {name for path, name in paths if not name.startswith((*OWN, *ROOMS)) and NAMED.search(path.read_text())}


def test_the_files_that_name_an_axis_are_those_listed_with_a_reason():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| `(\S+)` \| (.+) \|$", re.search(r"axis: begin(.*)axis: end", page, re.DOTALL)[1], re.MULTILINE
    )
    assert files_that_name_it() == {name for name, _ in rows} and len(rows) <= MOST
    assert all(len(reason) > 20 for _, reason in rows)


def test_its_own_files_and_the_rooms_exist():
    assert all((ROOT / "megatron" / name).exists() for name in (*OWN, *ROOMS))
