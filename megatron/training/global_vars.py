"""`Runtime`: the parts of a run below the model, and the functions by which scripts read them (get_args, get_timers,
...)."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state
from megatron.core.base import output_streams
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.datasets.vocab_check import within_embedding
from megatron.core.offload.offload_tiers import OffloadStore
from megatron.core.ops.cpu_half_precision_matmul import NATIVE, MatmulModes
from megatron.core.ops.deferred_wgrad import WeightGradStore
from megatron.core.ops.dropout import DropoutKeys
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_global_state, mesh_override
from megatron.core.parallel.mesh import Mesh
from megatron.core.timers import Timers
from megatron.core.tokenizers.tokenizer_config import NO_TOKENIZER
from megatron.core.tokenizers.tokenizer_registry import Tokenizer
from megatron.core.transformer.layer_build_context import LayerContext
from megatron.training.arguments.command_line import Arguments
from megatron.training.arguments.config import Config
from megatron.training.model_flops import ModelShape, TwoStackShape


def _with_these_ranks(of_config: Callable[[Config, int], Any]) -> property:
    """A quantity of the settings and the number of ranks, as a property of `Runtime`."""
    return property(lambda runtime: of_config(runtime.config, runtime.world_size))


@dataclass(frozen=True)
class Runtime:
    """Built by `pretrain` before the model, then passed on."""

    config: Config
    args: Arguments
    mesh: Mesh
    device: Device
    tokenizer: Tokenizer | None  # None for scripts with data of their own
    dropout_keys: DropoutKeys
    weight_grads: WeightGradStore
    timers: Timers = field(default_factory=Timers)
    offload_store: OffloadStore | None = None  # of offloaded state
    matmul_modes: MatmulModes = NATIVE  # how a CPU computes half-precision products
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # resources released at the end of the run
    tokenizer_sha256: str | None = None  # of its files' content
    data_sha256: str | None = None  # of the data's content; only on the first rank

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
                "this model needs a vocabulary size: give --vocab-size N, or --tokenizer-type with its files; a "
                "script sets its "
                'own by pretrain(..., args_defaults={"vocab_size": N})'
            )
        return size

    @property
    def model_shape(self) -> ModelShape | TwoStackShape:
        """The sizes that determine the model's FLOPs."""
        model, data = self.config.transformer, self.config.data
        shape = ModelShape.of(model, self.vocab_size, data.seq_length)
        layers, length = model.decoder_layers, data.decoder_seq_length
        return TwoStackShape(shape, layers, length) if layers and length else shape

    @property
    def layer_context(self) -> LayerContext:
        """The context that every layer of this rank gets."""
        return LayerContext.from_mesh(
            self.mesh,
            self.config.transformer.params_dtype,
            self.dropout_keys,
            offload_store=self.offload_store
            if self.offload_store is not None and self.offload_store.name == "file"
            else None,
            cp_types=tuple(self.config.parallel.cp_comm_type),
            longest=max(self.config.data.seq_length, self.config.data.decoder_seq_length or 0),
            restarts_positions=self.config.restarts_angles,
            sequence_parallel=self.config.parallel.sequence_parallel_on,
            device=self.device.torch_device,
            weight_grads=self.weight_grads,
            matmul_modes=self.matmul_modes,
            fills=not get_global_state().defers_initialization,
        )

    def model_parts(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> dict[str, Any]:
        """The keyword arguments of `GPTModel` for this rank's stage; with interleaving, for its chunk `vp_stage`."""
        mine = self.mesh.stages.of_rank(self.mesh["pp"].rank)
        return {
            "vocab_size": self.vocab_size,
            "positions": self.config.positions,
            "layers": self.config.layer_split[mine[vp_stage or 0]],
            "context": self.layer_context,
            "pre_process": pre_process,
            "post_process": post_process,
        }

    @property
    def building(self) -> dict[str, Any]:
        """How the ranks share the building of data sets, as functions that build them take it: the first builds indices, the
        others wait."""
        world, device = self.mesh["world"], self.device.torch_device
        wait = {"is_builder": world.is_first, "wait": lambda: collectives.barrier(world, device)}
        return wait | {"say": print_rank_0, "progress": print_rank_0}


def vocab_size_of(config: Config, tokenizer: Tokenizer | None) -> int | None:
    """Words of the model: --model-vocab-size, else those of the tokenizer, else --vocab-size; None if none is given."""
    words = config.tokenizer.vocab_size if tokenizer is None else tokenizer.vocab_size
    return config.tokenizer.model_vocab_size or words


_runtime: Runtime | None = None


class _OfThread(threading.local):
    runtime: Runtime | None = None
    acts = False  # whether it is another run for the time being, in `acting_as`


_override = _OfThread()  # tests run ranks as threads, each with its own runtime


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
    """Inside, in this thread, the run is another one, on its own mesh: for a rank of it that is not this process'."""
    before, acted = _override.runtime, is_dry_run()
    _override.runtime, _override.acts = runtime, True
    try:
        with mesh_override(runtime.mesh) as here:
            here.run, here.device = runtime, runtime.device.torch_device
            here.matmul_modes = runtime.matmul_modes
            here.sequence_parallel = runtime.config.parallel.sequence_parallel_on
            yield
    finally:
        _override.runtime, _override.acts = before, acted


def is_dry_run() -> bool:
    """Whether a script is called for the memory prediction alone: `print_rank_0` and `print_rank_last` print nothing
    then."""
    return _override.acts


def get_runtime() -> Runtime:
    """The parts of the run, for top-level scripts; megatron/core never calls it."""
    runtime = _override.runtime or _runtime
    if runtime is None:
        raise RuntimeError("the run is not initialised; call pretrain() or initialize_megatron() first")
    return runtime


def get_args() -> Arguments:
    """Every setting and every other flag of Megatron, by its name in Megatron's `args`."""
    return get_runtime().args


def get_tokenizer() -> Tokenizer:
    """The tokenizer of the run, with the ids that the model has rows for. Raises ConfigError if the run has none."""
    runtime = get_runtime()
    if runtime.tokenizer is None:
        raise ConfigError(f"this script asks for a tokenizer, and there is none: {NO_TOKENIZER}")
    return within_embedding(runtime.tokenizer, runtime.vocab_size)


def get_timers() -> Timers:
    """The timers of the run: `with get_timers()("name", log_level=2): ...`."""
    return get_runtime().timers


def is_last_rank() -> bool:
    """Whether this rank logs: the last rank with the last pipeline stage, where losses are known."""
    if parallel_state.model_parallel_is_initialized():
        mesh = parallel_state.get_mesh()
        return mesh["world"].rank == mesh.reporter()
    return parallel_state.launched_rank() == parallel_state.launched_world_size() - 1


def print_rank_0(message: str, rank: int | None = None) -> None:
    """Print once per run, from the first rank. rank: this process's, if the caller knows it."""
    if (parallel_state.launched_rank() if rank is None else rank) == 0 and not is_dry_run():
        _print_line(message)


def print_rank_last(message: str) -> None:
    """Print once per run, from the rank that logs (`is_last_rank`)."""
    if is_last_rank() and not is_dry_run():
        _print_line(message)


def _print_line(message: str) -> None:
    """In one write: ranks under a launcher write to one place, where another's line could come before the end of this
    one."""
    try:
        print(f"{message}\n", end="", flush=True)
    except OSError as error:  # of an object that the script has put in the place of standard output
        if output_streams.answers_failed():  # it is that of a tool
            raise
        output_streams.lose("the log", error)


__getattr__ = names_of_megatron(__name__)
