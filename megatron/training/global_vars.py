"""A `Runtime` holds the parts of a run that exist before the model.

Scripts read it by get_args, get_timers and so on.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state
from megatron.core.base import tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.token_ids_without_embedding_row import cap_vocab_size
from megatron.core.offload.host_and_file_stores import OffloadAllocator
from megatron.core.ops.cpu_half_precision_matmul import NATIVE, MatmulModes
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_global_state, mesh_override
from megatron.core.parallel.mesh import Mesh
from megatron.core.timers import Timers
from megatron.core.tokenizers.tokenizer_config_and_build import NO_TOKENIZER
from megatron.core.tokenizers.tokenizer_registry import Tokenizer
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.arguments.command_line import Arguments, ExtraArgs
from megatron.training.arguments.config import Config


def _with_these_ranks(of_config: Callable[[Config, int], Any]) -> property:
    """Return a property of `Runtime` that follows from the settings and the number of ranks."""
    return property(lambda runtime: of_config(runtime.config, runtime.world_size))


@dataclass(frozen=True)
class Runtime:
    """The parts of a run that exist before the model. `pretrain` builds it and passes it on."""

    config: Config
    args: Arguments
    mesh: Mesh
    device: Device
    tokenizer: Tokenizer | None  # None for scripts with their own data
    dropout_keys: SampleDropoutKeys
    weight_grads: WeightGradStore
    timers: Timers = field(default_factory=Timers)
    offload_store: OffloadAllocator | None = None  # for offloaded state
    matmul_modes: MatmulModes = NATIVE  # how a CPU computes half-precision products
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # released at the end of the run
    tokenizer_sha256: str | None = None  # of the content of its files
    data_sha256: str | None = None  # of the content of the data; only on the first rank

    @property
    def micro_batch_size(self) -> int:
        """Samples of the forward that runs on this rank: in validation it may have others than in training."""
        return get_global_state().micro_batch_size or self.config.training.micro_batch_size

    @property
    def world_size(self) -> int:
        return self.mesh["world"].size

    global_batch_size = _with_these_ranks(Config.global_batch_size)
    num_microbatches = _with_these_ranks(Config.num_microbatches)
    samples_at_once = _with_these_ranks(Config.samples_at_once)
    batch_sizes = _with_these_ranks(Config.batch_sizes)
    run_length = _with_these_ranks(Config.run_length)

    @property
    def vocab_size_if_any(self) -> int | None:
        """Vocabulary size: the tokenizer's, or without one --vocab-size; None if neither is given."""
        return vocab_size_of(self.config, self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size. Raises ConfigError if neither a tokenizer nor --vocab-size is given."""
        size = self.vocab_size_if_any
        if size is None:
            raise ConfigError(
                "this model needs a vocabulary size; give --vocab-size N, or --tokenizer-type with its files, or in "
                'a script pretrain(..., args_defaults={"vocab_size": N})'
            )
        return size

    @property
    def layer_context(self) -> LayerContext:
        """The context that every layer of this rank is built with."""
        file_store = None  # for offloaded activations; without it they go to host memory
        if self.offload_store is not None and self.offload_store.name == "file":
            file_store = self.offload_store
        return LayerContext.from_mesh(
            self.mesh,
            self.config.transformer.params_dtype,
            self.dropout_keys,
            offload_store=file_store,
            cp_types=tuple(self.config.parallel.cp_comm_type),
            longest=max(self.config.data.seq_length, self.config.data.decoder_seq_length or 0),
            restarts_positions=self.config.restarts_angles,
            masks_documents=self.config.data.masks_documents,
            sequence_parallel=self.config.parallel.sequence_parallel_on,
            device=self.device.torch_device,
            weight_grads=self.weight_grads,
            matmul_modes=self.matmul_modes,
            fills=not get_global_state().defers_initialization,
        )

    def model_parts(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> dict[str, Any]:
        """Return the keyword arguments of `GPTModel` for this rank's stage.

        With interleaving they are those of its chunk `vp_stage`.
        """
        stages = self.mesh.stages.of_rank(self.mesh["pp"].rank)  # by chunk
        return {
            "vocab_size": self.vocab_size,
            "positions": self.config.positions,
            "layers": self.config.layer_split[stages[vp_stage or 0]],
            "context": self.layer_context,
            "pre_process": pre_process,
            "post_process": post_process,
        }

    @property
    def building(self) -> dict[str, Any]:
        """The keyword arguments of functions that build data sets: the first rank builds indices, the others wait."""
        world = self.mesh["world"]
        device = self.device.torch_device
        return {
            "is_builder": world.is_first,
            "wait": lambda: collectives.barrier(world, device),
            "say": print_rank_0,
            "progress": print_rank_0,
        }


def vocab_size_of(config: Config, tokenizer: Tokenizer | None) -> int | None:
    """Return the model's vocabulary size: --model-vocab-size, else the tokenizer's, else --vocab-size.

    None if none is given.
    """
    size = config.tokenizer.vocab_size if tokenizer is None else tokenizer.vocab_size
    return config.tokenizer.model_vocab_size or size


_runtime: Runtime | None = None


class _ThreadOverride(threading.local):
    runtime: Runtime | None = None
    args: Arguments | None = None  # while there is no run, inside `with_args`
    acts = False  # whether the thread is inside `acting_as`


_override = _ThreadOverride()  # tests run ranks as threads, each with its own runtime


def set_runtime(runtime: Runtime | None, *, this_thread_only: bool = False) -> None:
    global _runtime
    if this_thread_only:
        _override.runtime = runtime
    else:
        _runtime = runtime
    if parallel_state.model_parallel_is_initialized():
        get_global_state().run = runtime


@contextlib.contextmanager
def acting_as(runtime: Runtime) -> Iterator[None]:
    """Replace the run of this thread inside, on the mesh of `runtime`: the memory prediction acts as other ranks do."""
    runtime_before = _override.runtime
    acts_before = _override.acts
    _override.runtime = runtime
    _override.acts = True
    try:
        with mesh_override(runtime.mesh) as global_state:
            global_state.run = runtime
            global_state.device = runtime.device.torch_device
            global_state.matmul_modes = runtime.matmul_modes
            global_state.sequence_parallel = runtime.config.parallel.sequence_parallel_on
            yield
    finally:
        _override.runtime = runtime_before
        _override.acts = acts_before


def is_dry_run() -> bool:
    """Whether a script is called for the memory prediction alone.

    `print_rank_0` and `print_rank_last` print nothing then.
    """
    return _override.acts


def get_runtime() -> Runtime:
    """Return the parts of the run, for top-level scripts; megatron/core never calls it."""
    runtime = _override.runtime or _runtime
    if runtime is None:
        raise RuntimeError("the run is not initialised; call pretrain() or initialize_megatron() first")
    return runtime


@dataclass
class ParsedFirst:
    """The arguments of a script that parses them before its run is set up, and how it parsed them."""

    args: Arguments
    extra_args_provider: ExtraArgs | None = None
    args_defaults: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(init=False)  # as they were parsed

    def __post_init__(self) -> None:
        self.values = dict(vars(self.args))

    def copy_changes_to(self, args: Arguments) -> None:
        """Assign to the run's `args` what the script has added or assigned since."""
        for name, value in vars(self.args).items():
            if name not in self.values or self.values[name] is not value:
                setattr(args, name, value)


_parsed_first: ParsedFirst | None = None


def set_parsed_first(parsed: ParsedFirst | None) -> None:
    """Let `get_args` return these arguments while there is no run."""
    global _parsed_first
    _parsed_first = parsed


def get_parsed_first() -> ParsedFirst | None:
    """Return the arguments that this process's script has parsed before its run; None if it has not."""
    return _parsed_first


def get_args() -> Arguments:
    """Return every setting and every other flag of Megatron, by its name in Megatron's `args`.

    Before the run they are those of `parse_and_validate_args`.
    """
    if (_override.runtime or _runtime) is None:
        if _override.args is not None:
            return _override.args
        if _parsed_first is not None:
            return _parsed_first.args
    return get_runtime().args


def with_args(args: Arguments, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the function, in which `get_args` returns `args` before there is a run. None stays None."""
    if function is None:
        return None

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        _override.args = args
        try:
            return function(*positional, **named)
        finally:
            _override.args = None

    return call


def get_tokenizer() -> Tokenizer:
    """Return the tokenizer of the run, limited to ids that the model's embedding has.

    Raises ConfigError if the run has none.
    """
    runtime = get_runtime()
    if runtime.tokenizer is None:
        raise ConfigError(f"this script needs a tokenizer: {NO_TOKENIZER}")
    return cap_vocab_size(runtime.tokenizer, runtime.vocab_size)


def get_timers() -> Timers:
    """Return the timers of the run: `with get_timers()("name", log_level=2): ...`."""
    return get_runtime().timers


def is_last_rank() -> bool:
    """Whether this rank logs: the last rank with the last pipeline stage, where losses are known."""
    if parallel_state.model_parallel_is_initialized():
        mesh = parallel_state.get_mesh()
        return mesh["world"].rank == mesh.reporter()
    return parallel_state.launched_rank() == parallel_state.launched_world_size() - 1


def print_rank_0(message: str, rank: int | None = None) -> None:
    """Print once per run, from the first rank. rank: this process's, if the caller knows it."""
    if rank is None:
        rank = parallel_state.launched_rank()
    if rank == 0 and not is_dry_run():
        _print_line(message)


def print_rank_last(message: str) -> None:
    """Print once per run, from the rank that logs (`is_last_rank`)."""
    if is_last_rank() and not is_dry_run():
        _print_line(message)


def _print_line(message: str) -> None:
    """Print a line in one write: under a launcher ranks share an output, and another's line could split this one."""
    try:
        print(f"{message}\n", end="", flush=True)
    except OSError as error:  # raised by an object with which the script has replaced standard output
        if tolerate_broken_output.answers_failed():  # the output of a tool, which must not be lost
            raise
        tolerate_broken_output.report_lost_output("the log", error)


__getattr__ = names_of_megatron(__name__)
