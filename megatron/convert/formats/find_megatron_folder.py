"""Find the checkpoint in a folder of Megatron-LM's, and recognize folders that cannot be read. No torch.

    latest_checkpointed_iteration.txt              a number, or "release"
    iter_0000100/mp_rank_00/model_optim_rng.pt     classic: a file for each tensor- and pipeline-parallel rank
    iter_0000100/mp_rank_01_003/...                tensor-parallel rank 1, stage 3; or with expert parallelism and one
                                                   stage, expert-parallel rank 3
    iter_0000100/mp_rank_01_003_005/...            tensor-parallel rank 1, stage 3, expert-parallel rank 5; not each pair of
                                                   the first and the last, if fewer ranks share an expert
    iter_0000100/.metadata, __0_0.distcp, ...      torch_dist, of all ranks; common.pt or metadata.json beside them

Only names that a folder lists are opened, and no link that leads out of it.
"""

import re
from collections.abc import Collection, Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.convert.formats.hf_config_and_safetensors_headers import adapter_hint, path_inside
from megatron.convert.formats.safetensors_header import FETCH_AGAIN
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing.manifest_format import LATEST, MANIFEST, CheckpointError, folder_name
from megatron.core.storage.file_layer import backend_of, is_file, is_folder, read_start

_RELEASE = "release"
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")  # the second from 2022-03 to 2023-05, with the distributed optimizer
METADATA = ".metadata"
COMMON = "common.pt"
_BACKEND = "metadata.json"  # of Megatron-core: names the format


class MegatronFolder(NamedTuple):
    """The folder of one iteration."""

    path: Path
    iteration: int  # 0 for a release
    kind: Literal["classic", "torch_dist"]


def is_megatron_folder(root: Path, iteration: int | None = None) -> bool:
    """Return whether `root`, or its folder of the iteration, holds a checkpoint of Megatron-LM."""
    try:
        path, _ = _folder_of(root, iteration)
        return _kind_of(path) is not None
    except (OSError, CheckpointError):
        return False


def find_megatron(root: Path, iteration: int | None = None) -> MegatronFolder:
    """Return the checkpoint of an iteration, by default the latest. Raises CheckpointError."""
    path, number = _folder_of(root, iteration)
    kind = _kind_of(path)
    if kind is None:
        raise CheckpointError(path, "holds no checkpoint of Megatron-LM", "give another folder or iteration")
    return MegatronFolder(path, number, kind)


def _folder_of(root: Path, iteration: int | None) -> tuple[Path, int]:
    """Return (folder, number) of an iteration, by default the latest.

    (root, 0) for a root without a list of iterations.
    """
    if iteration is not None:
        return root / folder_name(iteration), iteration
    if not is_file(root / LATEST):
        return root, 0  # the folder of an iteration itself
    text = read_start(root / LATEST, 100).decode("ascii", "replace").strip()
    if text == _RELEASE:
        return root / _RELEASE, 0
    if not re.fullmatch("[0-9]{1,12}", text):
        raise CheckpointError(
            root / LATEST, f"says {text!r:.40}, which is not an iteration", "write a number or release"
        )
    return root / folder_name(int(text)), int(text)


def _kind_of(path: Path) -> Literal["classic", "torch_dist"] | None:
    if not is_folder(path) or is_file(path / MANIFEST):  # a checkpoint with a manifest is ours
        return None
    if any(_RANK.fullmatch(name) and _file_of(path / name) for name in backend_of(path).names(path)):
        return "classic"
    if is_file(path / METADATA) and (is_file(path / COMMON) or is_file(path / _BACKEND)):
        return "torch_dist"
    return None


def _file_of(folder: Path) -> str | None:
    """Return the name of a rank's file."""
    return next((name for name in _FILES if is_file(folder / name)), None)


class MegatronRank(NamedTuple):
    """Whose file it is."""

    tensor: int
    stage: int
    expert: int = 0


def rank_files(path: Path) -> dict[MegatronRank, str]:
    """Return the file of each rank that has one, relative to `path`; the first rank has one.

    A second number of two is taken for the stage; `with_expert_ranks` tells what it is. Raises CheckpointError.
    """
    files: dict[MegatronRank, str] = {}
    for name in backend_of(path).names(path):
        rank = _RANK.fullmatch(name)
        if rank is None:
            continue
        file = _file_of(path / name)
        if file is None:
            raise CheckpointError(path / name, f"holds none of {', '.join(_FILES)}", FETCH_AGAIN)
        path_inside(path, f"{name}/{file}")
        files[MegatronRank(int(rank[1]), int(rank[2] or 0), int(rank[3] or 0))] = f"{name}/{file}"
    if MegatronRank(0, 0) not in files:
        raise _lacking(path, files, MegatronRank(0, 0))
    return files


def with_expert_ranks(files: Mapping[MegatronRank, str], args: Mapping[str, Any]) -> dict[MegatronRank, str]:
    """Return the files of a folder whose run had these args: a lone second number is of an expert-parallel rank or a stage."""
    experts = args.get("expert_model_parallel_size")
    stages = args.get("pipeline_model_parallel_size")
    if type(experts) is not int or experts < 2 or stages != 1 or any(rank.expert for rank in files):
        return dict(files)
    return {MegatronRank(rank.tensor, 0, rank.stage): file for rank, file in files.items()}


def expert_tensor_size(ranks: Collection[MegatronRank], args: Mapping[str, Any]) -> int:
    """Return how many ranks share each expert: as many as share the other layers, or fewer, which divide those.

    Of t tensor-parallel ranks and s that share an expert, rank i has part i % s of an expert.
    """
    tp = 1 + max(rank.tensor for rank in ranks)
    size = args.get("expert_tensor_parallel_size")
    is_smaller = args.get("num_experts") and type(size) is int and 0 < size < tp and tp % size == 0
    return size if is_smaller else tp


def check_all_ranks(path: Path, files: Mapping[MegatronRank, str], args: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a rank's file is missing. files: of `with_expert_ranks`.

    Where fewer ranks share an expert than share the other layers, a rank of both kinds may have no file: of 2
    tensor-parallel ranks and 2 that have other experts, whole, mp_rank_00_000 and mp_rank_01_001 are all.
    """
    tp, pp, ep = (1 + max(key[axis] for key in files) for axis in range(3))
    size = expert_tensor_size(files, args)
    if size < tp:
        dense = {(rank.tensor, rank.stage) for rank in files}
        experts = {(rank.tensor % size, rank.stage, rank.expert) for rank in files}
        lacking_dense = (("tensor", rank) for rank in product(range(tp), range(pp)) if rank not in dense)
        lacking_experts = (
            ("expert", rank[2:0:-1]) for rank in product(range(size), range(pp), range(ep)) if rank not in experts
        )
        for kind, (number, stage) in chain(lacking_dense, lacking_experts):
            wrong = f"has no file of {kind}-parallel rank {number}, stage {stage}, of {tp} tensor- and {ep} expert-parallel ranks"
            raise CheckpointError(path, wrong, "fetch the folder again, with the files of all ranks")
        return
    for key in product(range(tp), range(pp), range(ep)):
        if key not in files:
            raise _lacking(path, files, MegatronRank(*key))


def _lacking(path: Path, files: Collection[MegatronRank], rank: MegatronRank) -> CheckpointError:
    tp, pp, ep = (1 + max(key[axis] for key in files) for axis in range(3))
    of_experts = f", {ep} expert-parallel ranks" if ep > 1 else ""
    expert = f", expert-parallel rank {rank.expert}" if ep > 1 else ""
    wrong = (
        f"has files of {tp} tensor-parallel ranks and {pp} stages{of_experts}, and none of rank {rank.tensor}, stage "
        f"{rank.stage}{expert}"
    )
    return CheckpointError(path, wrong, "fetch the folder again, with the files of all ranks")


# ---------------------------------------------------------------- folders that are not read


def refuse_unsupported_format(root: Path) -> None:
    """Refuse a checkpoint of another trainer, naming the command that makes it readable. Raises ConfigError."""
    if not is_folder(root):
        return
    reason = unsupported_format_hint(root)
    if reason is not None:
        raise ConfigError(f"{root} {reason}")


_TO_HF = "then give --load OUT, with the model's config.json and tokenizer beside the weights"
_DEEPSPEED = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+.*_(optim|model)_states\.pt|layer_\d+-model_.*\.pt")


_HUB_MODEL = "models--"  # begins the name of a model's folder in the hub's cache


def _hub_cache_hint(root: Path) -> str | None:
    """Return which folders of the hub's cache hold models, if `root` is the cache or the folder of one model in it."""
    names = backend_of(root).names(root)
    models = [root / name for name in names if name.startswith(_HUB_MODEL)]
    if "snapshots" in names and ("blobs" in names or "refs" in names or root.name.startswith(_HUB_MODEL)):
        models = [root]
    snapshots = []
    for model in models:
        if is_folder(model / "snapshots"):
            snapshots += [str(model / "snapshots" / name) for name in backend_of(model).names(model / "snapshots")]
    if not models:
        return None
    kind = "the folder of a model in the hub's cache" if models == [root] else "a cache of the hub"
    if not snapshots:
        return f"is {kind}, without a snapshot; download the model again"
    more = f" (or another of its {len(snapshots)})" if len(snapshots) > 1 else ""
    return f"is {kind}; give a snapshot in it{more}: {snapshots[0]}"


def unsupported_format_hint(root: Path) -> str | None:
    """Return what is in a folder that no reader here supports, and the command that converts it.

    None for other folders. The text is the end of a sentence that begins with the folder's name.
    """
    problem = _hub_cache_hint(root) or adapter_hint(root)
    if problem is not None:
        return problem

    # DeepSpeed's `latest` names the folder that has the files.
    folder = root
    tag_file = next((name for name in ("latest", "latest_universal") if is_file(root / name)), None)
    if tag_file is not None:
        tag = read_start(root / tag_file, 200).decode("utf-8", "replace").strip()
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", tag) and is_folder(root / tag):
            folder = root / tag
    names = backend_of(folder).names(folder)

    has_optimizer_files = any(name.endswith("_optim_states.pt") for name in names)
    if "zero" in names and is_folder(folder / "zero") and not has_optimizer_files:
        return (
            "holds a universal checkpoint of DeepSpeed; what is read is the weights of the checkpoint that it was "
            f"made of: in that folder, python zero_to_fp32.py . OUT --safe_serialization; {_TO_HF}"
        )
    if METADATA in names and any(name.endswith(".distcp") for name in names):
        return (
            "holds a checkpoint of torch.distributed.checkpoint, as torchtitan writes them, whose model nothing "
            "in it describes: put the model's config.json, of a llama or qwen3 in Hugging Face's form, and its "
            f"tokenizer.json beside {METADATA}; "
            "then it is read as it lies. For other models: torchtitan's convert_to_hf.py; the tensors alone: "
            "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE"
        )
    if any(_DEEPSPEED.fullmatch(name) for name in names):
        return (
            f"holds a checkpoint of DeepSpeed; in it, run python zero_to_fp32.py . OUT --safe_serialization; {_TO_HF}"
        )
    return None
