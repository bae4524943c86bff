"""A `Runtime` is built from the command line: parse, check, join the other ranks, agree on the settings.

parse_and_check_settings    this rank alone: parse the flags, check them, select the device, build the tokenizer
start_distributed           join the process group
agree_on_settings           all ranks: refuse invalid or different settings, before any other group is created
initialize_model_parallel, seed_generators_by_stage, build_runtime
"""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from megatron.core import parallel_state
from megatron.core.base import rank_status, tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError, problems_of
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.base.user_error_and_torchrun_error_file import is_user_error, write_error_file
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle
from megatron.core.datasets.token_files_sha256 import data_sha256
from megatron.core.datasets.token_ids_without_embedding_row import (
    cap_vocab_size,
    embedding_rows_problem,
    ids_without_row_note,
)
from megatron.core.models.common.model_rules import NO_RULES, ModelRules
from megatron.core.offload.host_and_file_stores import make_offload_store
from megatron.core.offload.offload_folder import offload_folder_conflicts, remove_surplus_rank_folders
from megatron.core.ops import cpu_half_precision_matmul as matmul
from megatron.core.ops.compile.compiled_region import compile_if_all_ranks_can
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.device_and_process_group_config import DeviceConfig
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.launcher_environment import Launch, discover, threads_per_rank
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rank_grid import ORDER, Axis
from megatron.core.storage.path_or_url import is_url, path_of
from megatron.core.timers import Timers
from megatron.core.tokenizers import build_tokenizer
from megatron.core.tokenizers.tokenizer_registry import Tokenizer
from megatron.core.tokenizers.tokenizer_sha256 import tokenizer_sha256
from megatron.training.arguments.choose_checkpoint_to_resume import mistake_in
from megatron.training.arguments.command_line import (
    Arguments,
    ArgumentsError,
    ExtraArgs,
    parse_args as parse_command_line,
)
from megatron.training.arguments.config import Config
from megatron.training.arguments.hf_config import hf_config_problems, other_model_problem
from megatron.training.arguments.monitor_config import watch_notes
from megatron.training.arguments.unused_settings import without_effect_on_few_ranks
from megatron.training.arguments.validation import check, drop_doubtful_problems, with_default_components
from megatron.training.checkpointing.save_and_load_run_state import load_saved_matmul_modes
from megatron.training.fault_tolerance import hang_watch
from megatron.training.fault_tolerance.exit_conditions import listen_for_requests
from megatron.training.global_vars import Runtime, print_rank_0, print_rank_last, set_runtime, vocab_size_of, with_args
from megatron.training.memory.memory_check import offload_notes


@dataclass(frozen=True)
class Settings:
    """The checked settings of a rank, its device and its tokenizer, before it joins the others."""

    config: Config
    args: Arguments
    notes: list[str]
    device: Device
    tokenizer: Tokenizer | None
    tokenizer_sha256: str | None


@accepts_defaults_only(parsed_args=None, store=None)
@accepts_defaults_only("allow_no_cuda", skip_mpu_initialization=False)
@accepts_defaults_only("args_defaults", ignore_unknown_args=False)
def initialize_megatron(
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    allow_no_cuda: bool = False,
    get_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    *,
    argv: Sequence[str] | None = None,
    rules: ModelRules = NO_RULES,
) -> Runtime:
    """Build the runtime: everything before the model. Every rank must call.

    Ranks may be started with different or invalid settings, so they agree first. Raises ConfigError on ranks with
    invalid settings and PeerError on the others, before any group but the first is created.
    """
    del allow_no_cuda  # Megatron's argument; here the device is --device, or the one that exists

    # read the settings; in a job of several ranks an error waits until all ranks can be told
    settings = None
    problem = None
    tolerate_broken_output.keep_running(parallel_state.launched_rank())
    rank_status.enter("reading settings")
    try:
        settings = parse_and_check_settings(extra_args_provider, args_defaults, argv, rules)
    except ConfigError as error:
        if parallel_state.launched_world_size() == 1:
            raise
        problem = error

    # choose the device; a rank with invalid settings joins by the kind of device that the others probably have
    if settings is not None:
        device = settings.device
        device_config = settings.config.device
        listen_for_requests(settings.config.training)
        hang_watch.set_limits(settings.config.hangs, device_config.distributed_timeout_minutes)
    else:
        device = Device.select(local_rank=parallel_state.launched_local_rank())
        device_config = DeviceConfig()

    # join the process group
    parallel_state.start_distributed(
        device_config.distributed_backend or device.backend, device_config.distributed_timeout_minutes
    )
    if device.identity and (taken := parallel_state.shared_device_problem(device.identity)):
        earlier_problems = [] if problem is None else problem.problems
        problem = ConfigError([*earlier_problems, taken])

    # agree on the settings; from here on they are valid and equal on all ranks
    rank_status.enter("agreeing on settings")
    agree_on_settings(settings, problem)

    # create the groups of the mesh
    rank_status.enter("making groups")
    config = settings.config
    # a script's choice of ranks may read the settings
    get_embedding_ranks = with_args(settings.args, get_embedding_ranks)
    get_position_embedding_ranks = with_args(settings.args, get_position_embedding_ranks)
    mesh = parallel_state.initialize_model_parallel(
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        stages=config.stages,
        context_parallel_size=config.parallel.context_parallel_size,
        hierarchical_context_parallel_sizes=config.parallel.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=config.parallel.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.data_parallel.num_distributed_optimizer_instances,
        ranks_per_kv_head=config.transformer.ranks_per_kv_head(config.parallel.tensor_model_parallel_size),
        distributed_timeout_minutes=config.device.distributed_timeout_minutes,
        order=config.parallel.order,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
    )

    # set the global state that Megatron's functions read, and the seeds
    global_state = get_global_state()
    global_state.device = device.torch_device
    global_state.sequence_parallel = config.parallel.sequence_parallel_on
    seed_generators_by_stage(config.training.seed, mesh)

    # build the runtime and print the layout
    runtime = build_runtime(settings, mesh)
    set_runtime(runtime)
    announce(runtime, settings.notes)
    return runtime


def build_runtime(settings: Settings, mesh: Mesh) -> Runtime:
    """Build the `Runtime` from checked settings and a mesh. Every rank must call."""
    config = settings.config
    device = settings.device
    world = mesh["world"]

    # timers
    timers = Timers(
        config.log.timing_log_level,
        config.log.timing_log_option,
        device=device,
        world=world,
        barrier=config.log.barrier_with_L1_time,
        say=print_rank_last,
    )

    # the store of offloaded state; a rank that cannot open it stops all ranks
    with collectives.raise_together(world, device.torch_device):
        offload_store = make_offload_store(config.offload, world.rank, device.torch_device)
        settings.notes.extend(_remove_left_behind(config, world.size))

    # how to compute half-precision matrix products, and whether to compile
    matmul_modes = choose_matmul_modes(config, world, device, settings.notes)
    get_global_state().matmul_modes = matmul_modes
    settings.notes.extend(compile_if_all_ranks_can(config.transformer, device.torch_device, world))

    # the hash of the data, which checkpoints record; the first rank alone reads the files
    data_hash = None
    if (config.checkpoint.save or config.checkpoint.load) and world.is_first:
        data_hash = data_sha256(config.data)

    runtime = Runtime(
        config,
        settings.args.and_also(derived_settings(config, mesh, settings.tokenizer)),
        mesh,
        device,
        settings.tokenizer,
        SampleDropoutKeys(config.training.seed),
        WeightGradStore(),
        timers,
        offload_store,
        matmul_modes=matmul_modes,
        tokenizer_sha256=settings.tokenizer_sha256,
        data_sha256=data_hash,
    )

    # released at the end of the run, the last one first
    runtime.resources.callback(device.restore)
    if offload_store is not None:
        runtime.resources.callback(offload_store.close)
    return runtime


def choose_matmul_modes(config: Config, world: Axis, device: Device, notes: list[str]) -> matmul.MatmulModes:
    """Return how to compute half-precision products: as in the checkpoint, or as measured. Every rank must call.

    Adds a note to `notes`. A resumed run computes as the checkpoint's run did, so that its numbers stay the same.
    """
    dtype = config.transformer.params_dtype
    requested = config.transformer.cpu_half_products
    saved = None
    if requested == "auto" and matmul.is_half_precision_on_cpu(dtype, device.torch_device):
        saved = load_saved_matmul_modes(config.checkpoint, world, device.torch_device)
    modes, note = matmul.select_matmul_modes(dtype, device.torch_device, world, requested=requested, saved=saved)
    if note:
        notes.append(note)
    return modes


def parse_and_check_settings(
    extra_args_provider: ExtraArgs | None,
    args_defaults: Mapping[str, Any] | None,
    argv: Sequence[str] | None,
    rules: ModelRules = NO_RULES,
) -> Settings:
    """Parse and check the command line and prepare this rank's device. Raises ConfigError with all problems."""
    world_size = parallel_state.launched_world_size()

    def without_effect(config: Config) -> dict[str, str]:
        return rules.without_effect(config) | without_effect_on_few_ranks(config, world_size)

    # parse; after a parsing error, check the flags that could be parsed, so that all problems are reported at once
    try:
        parsed = parse_command_line(argv, extra_args_provider, args_defaults, rules.unread, without_effect)
    except ArgumentsError as error:
        other_problems = collect_config_problems(with_default_components(error.parts), world_size, rules).problems
        raise ConfigError(
            error.problems + drop_doubtful_problems(error.problems, error.parts, other_problems)
        ) from None

    # check
    config = parsed.config
    examined = collect_config_problems(config, world_size, rules)
    if examined.problems:
        raise ConfigError(examined.problems)
    device = examined.device
    tokenizer = examined.tokenizer

    # collect the notes to print; share_cores sets the number of threads, which the last note reads
    notes = list(parsed.notes)
    launch = Launch() if parallel_state.has_joined() else discover(os.environ)
    notes += share_cores(launch)
    notes += watch_notes(config.tensorboard, config.profile, config.training.train_iters)
    notes += _notes_of_settings(config, world_size)
    if tokenizer is not None:
        note = ids_without_row_note(tokenizer, vocab_size_of(config, tokenizer))
        if note is not None:
            notes.append(note)
    offloads_activations = config.transformer.cpu_offloading_num_layers > 0
    notes += offload_notes(device.name, config.offload.tier, offloads_activations, torch.get_num_threads())

    # prepare the device
    empty_level = max(config.device.empty_unused_memory_level, int(config.offload.tier == "file"))
    device.prepare(bf16=config.transformer.bf16, empty_level=empty_level, ranks=world_size)
    if config.device.deterministic_mode:
        notes.append(device.use_deterministic_kernels())
    if config.profile.record_memory_history:
        device.record_memory_history()

    tokenizer_hash = None
    if tokenizer is not None:
        tokenizer_hash = tokenizer_sha256(config.tokenizer, tokenizer)
    return Settings(config, parsed.args, notes, device, tokenizer, tokenizer_hash)


def _notes_of_settings(config: Config, world_size: int) -> Iterator[str]:
    """Yield notes on a ZeRO that shards nothing, and on --reuse-fp32-param.

    ZeRO shards nothing where each sharding group is a single rank.
    """
    stage = config.data_parallel.stage
    instances = config.data_parallel.num_distributed_optimizer_instances
    if stage and 1 < instances == config.data_parallel_size(world_size):
        yield (
            f"no effect here: ZeRO stage {stage}, because --num-distributed-optimizer-instances {instances} is the "
            "data-parallel size: each group has only one rank, and that rank holds all shards"
        )
    if config.optimizer.reuse_fp32_param:
        yield (
            "--reuse-fp32-param: weights are the masters rounded to nearest even; this is the same without the flag. "
            "Masters are stored exactly, with one exception: a master that is exactly halfway between two weights and "
            "is rounded towards zero (1 in 131,072 by chance) is stored one unit in its last place nearer to zero. "
            "Therefore the last digits of losses may in time differ from those of a run without the flag"
        )


class Examined(NamedTuple):
    """The problems of settings on this host, and the device and tokenizer that they name."""

    problems: list[str]
    device: Device | None
    tokenizer: Tokenizer | None


def collect_config_problems(config: Config, world_size: int, rules: ModelRules) -> Examined:
    """Check settings against each other and against this host's files and devices."""
    problems, tokenizer = examine_without_device(config, world_size, rules)
    device = None
    with collected(problems):
        device = select_device(config.device)
    return Examined(problems, device, tokenizer)


def examine_without_device(config: Config, world_size: int, rules: ModelRules) -> tuple[list[str], Tokenizer | None]:
    """Return the problems of the settings, their files and their tokenizer, and the tokenizer.

    A missing package is a problem too.
    """
    problems: list[str] = []

    # the settings against each other, and their files
    with collected(problems):
        check(config, world_size)
    problems += file_problems(config, reads_text=rules.reads_text)

    # the tokenizer
    tokenizer = None
    if config.tokenizer.tokenizer_type is not None:
        with collected(problems):
            try:
                tokenizer = build_tokenizer(config.tokenizer)
            except ImportError as error:
                raise ConfigError(f"--tokenizer-type {config.tokenizer.tokenizer_type}: {error}") from error

    # the tokenizer against the model's vocabulary
    vocab_size = config.tokenizer.model_vocab_size
    problem = None
    if tokenizer is not None and vocab_size is not None:
        problem = embedding_rows_problem(tokenizer, vocab_size)
    if problem:
        problems.append(
            f"{problem}, or --resize-token-embeddings tokens to start from the rows of the words that both have"
        )
    elif tokenizer is not None and config.fim.fim_data:
        with collected(problems):  # raises if the vocabulary lacks its tokens
            FillInTheMiddle(
                config.fim, cap_vocab_size(tokenizer, vocab_size_of(config, tokenizer)), config.training.seed
            )

    # the Hugging Face configuration, and the model's own rules
    other_model = other_model_problem(config, rules)
    if other_model is not None:
        return [other_model], tokenizer
    problems = problems + hf_config_problems(config) + rules.expert_problems(config)
    problems += rules.problems(config, tokenizer)
    return problems, tokenizer


def select_device(config: DeviceConfig) -> Device:
    """Return this rank's device.

    Raises ConfigError if --distributed-backend cannot connect its processes; a single process may name any backend.
    """
    local_rank = config.local_rank
    if local_rank is None:
        local_rank = parallel_state.launched_local_rank()
    device = Device.select(config.device, local_rank)
    backend = config.distributed_backend
    if backend != "gloo":
        device.check_number(parallel_state.launched().local_size)
    if backend not in (None, "gloo", device.backend) and parallel_state.will_join():
        raise ConfigError(
            f"--distributed-backend {backend} cannot connect processes on --device {device.name}; leave it out "
            f"(default: {device.backend}), or change --device"
        )
    return device


def file_problems(config: Config, *, reads_text: bool = True) -> list[str]:
    """Return the missing files, and the folders that cannot be written, on this host. Creates nothing."""
    problems = config.data.missing_files() if reads_text else []

    # folders to write
    load = config.checkpoint.load
    offload_dir = config.offload.offload_dir
    folders = {
        "--save": config.checkpoint.save,
        "--data-cache-path": config.data.data_cache_path,
        "--offload-dir": offload_dir,
    }
    for flag, folder in folders.items():
        if folder is None:
            continue
        # An existing cache may be read-only; if it lacks an index, the builder of that index reports it.
        if flag == "--data-cache-path" and folder and any(Path(folder).glob("*-description.txt")):
            continue
        if is_url(folder):
            continue
        obstacle = _obstacle(path_of(folder))
        if obstacle:
            problems.append(f"{flag} {folder} cannot be written: {obstacle}; choose another folder")
    if offload_dir is not None:
        problems += offload_folder_conflicts(offload_dir, parallel_state.launched_rank())

    # a file in place of the checkpoint's folder
    if load is not None and not is_url(load) and os.path.isfile(path_of(load)):
        problems.append(f"--load {load} {mistake_in(path_of(load))}")
    return problems


def _obstacle(folder: Path) -> str | None:
    """Return why files cannot be written into `folder`, which may not exist yet; None if they can."""
    # the folder itself, or else its nearest parent that exists
    existing = Path("/")
    for path in (folder, *folder.absolute().parents):
        if os.path.lexists(path):
            existing = path
            break
    if not existing.exists():
        return f"{existing} is a link to {os.readlink(existing)}, which does not exist"
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} allows this user no new files"
    return None


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add the block's ConfigError, ValueError or OSError to `problems`, so that all are reported at once."""
    try:
        with as_config_error():
            yield
    except ConfigError as error:
        problems += error.problems


def share_cores(launch: Launch) -> list[str]:
    """Set this process's number of threads to its share of the node's cores; returns a note. Sets no core affinity."""
    cores, bound = affinity_cores()
    threads = threads_per_rank(os.environ, launch, cores, bound=bound)
    if threads is None:
        return []
    torch.set_num_threads(threads)
    return [
        f"{threads} thread(s) per rank: {cores} cores for {launch.local_size} ranks of a node; OMP_NUM_THREADS sets another "
        "number"
    ]


def affinity_cores() -> tuple[int, bool]:
    """Return the number of cores that this process may use, and whether the launcher has restricted them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1, False
    cores = os.sched_getaffinity(0)
    try:
        return len(cores), cores < os.sched_getaffinity(os.getppid())
    except OSError:  # the parent has ended, or belongs to another user
        return len(cores), False


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """Turn ValueError and OSError, raised for files that the user named, into ConfigError.

    That is reported once, without traceback.

    A ValueError that Python or a library raises in our own code is no fault of the user, and keeps its traceback.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        if not is_user_error(error):
            raise
        raise ConfigError(problems_of(error)) from error
    except OSError as error:
        raise ConfigError(str(error)) from error


def agree_on_settings(settings: Settings | None, problem: ConfigError | None) -> None:
    """Raise on every rank if a rank has a `problem` or other settings: the run would hang, or train a wrong model."""
    world = parallel_state.agreement_axis()
    with collectives.raise_together(world):
        if problem is not None:
            raise problem
    # A script's own flags may differ between ranks, unless the meaning of the parameters depends on them ("own_model").
    shared = {name: part for name, part in settings.config.as_json().items() if name not in ("device", "own")}
    fingerprint = collectives.fingerprint(f"{shared} {settings.tokenizer_sha256}")

    # equal on all ranks if the maximum of the fingerprints is their minimum, which is -max(-fingerprint)
    extremes = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64)  # [2]
    collectives.all_reduce(extremes, world, "max")
    if extremes[0].item() != -extremes[1].item():
        raise ConfigError("the ranks were started with different settings or tokenizers; start all with the same ones")


def _remove_left_behind(config: Config, world_size: int) -> list[str]:
    """Remove the files of offloaded state that killed runs have left on this node.

    The node's first rank does, and returns a note.
    """
    if config.offload.tier != "file" or parallel_state.launched_local_rank() != 0:
        return []
    folder = config.offload.offload_dir
    removed = remove_surplus_rank_folders(folder, world_size)
    if not removed:
        return []
    names = removed[0]
    if len(removed) > 1:
        names = f"{removed[0]} to {removed[-1]}"
    return [f"--offload-dir {folder}: removed {names}, left by a run that was killed"]


def derived_settings(config: Config, mesh: Mesh, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the entries of Megatron's `args` that are not flags."""
    padded_vocab_size = None
    vocab_size = vocab_size_of(config, tokenizer)
    if vocab_size is not None:
        tp = config.parallel.tensor_model_parallel_size
        padded_vocab_size = config.transformer.padded_vocab_size(vocab_size, tp)
    return {
        "rank": parallel_state.launched_rank(),
        "world_size": mesh["world"].size,
        "data_parallel_size": mesh.samples.size,
        "params_dtype": config.transformer.params_dtype,
        "padded_vocab_size": padded_vocab_size,
        "virtual_pipeline_model_parallel_size": get_global_state().virtual_size,
        "global_batch_size": config.global_batch_size(mesh["world"].size),
        "max_position_embeddings": config.positions,
        "ffn_hidden_size": config.transformer.ffn_size,
        "kv_channels": config.transformer.head_width,
        # Megatron's pipeline may have a stage without layers besides
        "transformer_pipeline_model_parallel_size": mesh["pp"].size,
        # where the run is, and which splits it reads: `Trainer` keeps them up to date
        "iteration": 0,
        "curr_iteration": 0,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "do_train": False,
        "do_valid": False,
        "do_test": False,
    }


def seed_generators_by_stage(seed: int, mesh: Mesh) -> None:
    """Seed python's, numpy's, torch's and the tracked generators, by stage as in Megatron.

    Only scripts draw from them.
    """
    seed += 100 * mesh["pp"].rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_global_state().seed = seed


def announce(runtime: Runtime, notes: Sequence[str]) -> None:
    """Print the layout, the settings that differ from their defaults, and the notes, once."""
    config = runtime.config
    mesh = runtime.mesh

    # the layout: tp, pp and dp always, other axes if they have several ranks
    names = ["tp", "pp", "dp"]
    for name in ORDER.split("-"):
        if name not in names and mesh[name].size > 1:
            names.append(name)
    layout = ", ".join(f"{name} {mesh[name].size}" for name in names)

    # the microbatches, of which a batch size ramp has fewer at first
    microbatches = [size // runtime.samples_at_once for size in runtime.batch_sizes.sizes]
    ramp = f"{microbatches[0]} to " if len(microbatches) > 1 else ""
    print_rank_0(
        f"{runtime.world_size} rank(s) on {runtime.device.name}: {layout}; "
        f"{ramp}{runtime.num_microbatches} microbatch(es) of {config.training.micro_batch_size} per rank and step"
    )

    # the settings that differ from their defaults, and the notes
    if changed := config.changed_lines():
        print_rank_0("settings that are not the default:\n" + "\n".join(changed))
    for note in notes:
        print_rank_0(note)


def stop_with(error: ConfigError | collectives.PeerError) -> NoReturn:
    """Print the problems once, leave the process group and exit with code 2.

    Every rank must call, with its own error.
    """
    problems = problems_of(error)
    lines = "\n".join(f"  - {problem}" for problem in problems)
    message = f"cannot start, {len(problems)} problem(s):\n{lines}"
    write_error_file(message)
    if (
        parallel_state.launched_rank() == 0 or not parallel_state.has_joined()
    ):  # without a process group every process prints
        tolerate_broken_output.print_stderr(message)
    parallel_state.stop_distributed()
    sys.exit(2)


__getattr__ = names_of_megatron(__name__)
