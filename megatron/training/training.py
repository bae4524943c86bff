"""`pretrain` is the entry of all top-level scripts: one run from its command line to its end.

pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    initialize      settings, processes, device, tokenizer              initialize.py
    build           model chunks, buffers, optimizer, data, checkpoint  Trainer(...), trainer.py
    run             the steps, then validation and test                 Trainer.run
    shut down       whatever happened, every rank in the same order     failure_shutdown.py
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from megatron.core import parallel_state
from megatron.core.base import rank_status, tolerate_broken_output
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.exit_callbacks_and_hard_exit import say_last_words
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.base.user_error_and_torchrun_error_file import write_error_file
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import NO_RULES, ModelRules
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.training.argument_utils import PretrainConfigContainer
from megatron.training.arguments.choose_checkpoint_to_resume import resume_hint
from megatron.training.arguments.command_line import ExtraArgs
from megatron.training.build_model_optimizer_and_data import (
    DatasetsProvider,
    build_train_valid_test_data_iterators,
    setup_model_and_optimizer,
)
from megatron.training.fault_tolerance import (
    exit_immediately_on_ctrl_c,
    exit_with_launcher,
    failure_shutdown,
    hang_watch,
)
from megatron.training.fault_tolerance.exit_conditions import stop_listening
from megatron.training.global_vars import ParsedFirst, Runtime, set_runtime
from megatron.training.initialize import initialize_megatron, stop_with
from megatron.training.make_chunks_optimizer_and_pipeline import ModelProvider
from megatron.training.memory import oom_advice
from megatron.training.trainer import NonLossData, Trainer

__all__ = ["Trainer", "build_train_valid_test_data_iterators", "pretrain", "setup_model_and_optimizer"]


class Script(NamedTuple):
    """The arguments of `pretrain` by a top-level script, under the same names and in one order."""

    train_valid_test_datasets_provider: DatasetsProvider
    model_provider: ModelProvider
    forward_step: ForwardStep
    extra_args_provider: ExtraArgs | None
    args_defaults: Mapping[str, Any] | None
    ranks_of: Mapping[str, Callable[..., Sequence[int]] | None]  # get_embedding_ranks, get_position_embedding_ranks
    non_loss: NonLossData
    rules: ModelRules
    group_of: GroupRule
    argv: Sequence[str] | None
    parsed: ParsedFirst | None = None  # by a script that has parsed its arguments first


def takes_arguments_first(function: Callable[..., None]) -> Callable[..., None]:
    """Let `pretrain` take Megatron's container of parsed arguments in front, in either order of what follows.

    (container, datasets provider, model provider, model type, forward step, process_non_loss_data_func, ...)
    (container, datasets provider, model type, forward step[, model provider], process_non_loss_data_func, ...)
    """

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> None:
        container = positional[0] if positional else named.pop("cfg_container", None)
        if not isinstance(container, PretrainConfigContainer):
            return function(*positional, **named)
        names = ["train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"]
        if len(positional) > 2 and isinstance(positional[2], ModelType):
            names = [names[0], names[2], names[3], names[1]]
        names += [
            "process_non_loss_data_func",
            "get_embedding_ranks",
            "get_position_embedding_ranks",
            "non_loss_data_func",
            "store",
            "inprocess_call_wrapper",
        ]
        given = dict(zip(names, positional[1:], strict=False))
        if len(positional) - 1 > len(names) or given.keys() & named.keys():
            raise TypeError(f"pretrain() takes {', '.join(names)} behind the arguments, each once")
        given |= named
        if given.get("model_provider") is None:
            given["model_provider"] = container.model_provider
        if given["model_provider"] is None:
            raise TypeError("pretrain() needs a model_provider, or a model's config in the container of arguments")
        return function(**given, parsed=container.parsed)

    return call


@takes_arguments_first
@accepts_defaults_only(
    store=None, inprocess_call_wrapper=None, p2p_communicator=None, pg_collection=None, skip_model_parallel_init=False
)
def pretrain(
    train_valid_test_dataset_provider: DatasetsProvider,
    model_provider: ModelProvider,
    model_type: ModelType | ForwardStep,
    forward_step_func: ForwardStep | None = None,
    process_non_loss_data_func: Callable[[Any, int, Any], None] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    get_position_embedding_ranks: Callable[..., Sequence[int]] | None = None,
    non_loss_data_func: Callable[[list[nn.Module]], Any] | None = None,
    *,
    rules: ModelRules = NO_RULES,
    group_of: GroupRule = default_group,
    argv: Sequence[str] | None = None,
    parsed: ParsedFirst | None = None,
) -> None:
    """Train a model from the command line's settings. Every process of the job calls it.

    The arguments have Megatron's order; an earlier one, without model_type, works too, and so do the later ones, which
    have the container of `pretrain_cfg_container_from_args` in front (`takes_arguments_first`).
    Invalid settings end all processes with code 2. A later error ends them with code 1, or 3 if numbers are wrong, and
    with the message of the failing rank. A job of one process raises that error, unless the message alone says what to
    change (for example for a NaN loss).

    model_type: encoder_and_decoder has a second stack of layers (--decoder-num-layers), which the pipeline's stages
        share too; add_encoder and add_decoder say which of the stacks a stage has layers of
    train_valid_test_dataset_provider([n_train, n_valid, n_test]) -> three data sets, or None in place of a set. A data
        set has a length, and its items are dictionaries of arrays. Every rank calls the provider, whatever its
        `is_distributed` says.
    model_provider(pre_process, post_process[, vp_stage][, add_encoder, add_decoder]) -> this stage's part of the model
    forward_step_func(data_iterator, model) -> (output, loss_func); loss_func(output) -> (loss_sum, num_tokens, report)
    extra_args_provider(parser) adds the script's own flags; args_defaults: defaults of settings, by name
    process_non_loss_data_func(data, iteration, writer=None) is called on the last rank after each validation. data is
        the result of non_loss_data_func(model chunks), or a list of loss_func(output, non_loss_data=True) over the
        microbatches of a batch.
    get_embedding_ranks, get_position_embedding_ranks: as in `initialize_model_parallel`
    rules: the model's own rules about settings, beside the rules for every run
    group_of(name, placement) -> the group that sets how this parameter is updated
    parsed: how a script has parsed its arguments, if it did so first
    """
    # accept the order without a model type: (datasets_provider, model_provider, forward_step, extra_args_provider, args_defaults)
    if forward_step_func is None or not isinstance(model_type, ModelType):
        args_defaults = process_non_loss_data_func or args_defaults
        process_non_loss_data_func = None
        extra_args_provider = forward_step_func or extra_args_provider
        forward_step_func = model_type
        if isinstance(forward_step_func, ModelType) or not callable(forward_step_func):
            expected = "forward_step(data_iterator, model) -> (output, loss_func)"
            raise TypeError(f"pretrain() needs {expected} after the model type")

    # the settings of a script that has parsed them itself
    if parsed is not None:
        extra_args_provider = parsed.extra_args_provider
        args_defaults = parsed.args_defaults

    # an encoder and decoder model has a decoder, as long as the encoder unless the flag gives another length
    if model_type is ModelType.encoder_and_decoder:
        args_defaults = {"decoder_num_layers": 0, **(args_defaults or {})}

    run_script(
        Script(
            train_valid_test_datasets_provider=train_valid_test_dataset_provider,
            model_provider=model_provider,
            forward_step=forward_step_func,
            extra_args_provider=extra_args_provider,
            args_defaults=args_defaults,
            ranks_of={
                "get_embedding_ranks": get_embedding_ranks,
                "get_position_embedding_ranks": get_position_embedding_ranks,
            },
            non_loss=NonLossData(process_non_loss_data_func, non_loss_data_func),
            rules=rules,
            group_of=group_of,
            argv=argv,
            parsed=parsed,
        )
    )


def run_script(script: Script) -> None:
    """Train as the script says, to the end.

    `pretrain` calls it by this name, which tools replace to read a script alone.
    """
    began = time.monotonic()

    # keep running if an output is closed, end with the launcher, listen to Ctrl-C, and watch for hangs
    rank = parallel_state.launched_rank()
    tolerate_broken_output.keep_running(rank)
    exit_with_launcher.end_with_launcher(rank)
    with (
        exit_immediately_on_ctrl_c.ExitOnInterrupt(rank) as ctrl_c,
        hang_watch.watching(rank, parallel_state.launched_world_size()),
    ):
        try:
            _run(script, began, ctrl_c)
        finally:
            stop_listening()


def _run(script: Script, began: float, ctrl_c: exit_immediately_on_ctrl_c.ExitOnInterrupt) -> None:
    """Run one job. Whatever ends it, every rank shuts down in the same order.

    began: `time.monotonic()` of the start.
    """
    runtime = None
    trainer = None
    listener = None
    code = 0  # of an error that is known to the other ranks
    try:
        # settings, process group, device and tokenizer
        runtime = initialize_megatron(
            script.extra_args_provider, script.args_defaults, argv=script.argv, rules=script.rules, **script.ranks_of
        )
        if script.parsed is not None:
            script.parsed.copy_changes_to(runtime.args)

        # under NCCL, end this rank too if another fails, which collectives would not notice
        listener = failure_shutdown.start_failure_listener()

        # model, optimizer, checkpoint and data
        trainer = Trainer(
            runtime,
            script.train_valid_test_datasets_provider,
            script.model_provider,
            script.forward_step,
            script.group_of,
            began,
            script.non_loss,
        )

        # the steps, then validation and test
        trainer.run()
    except (Exception, KeyboardInterrupt) as error:
        # while a hang alarm is on, wait: the watching thread knows the cause, reports it and ends the process
        hang_watch.wait_for_diagnosis()

        # put the error into words; interruption: the message if the cause is Ctrl-C
        interruption = None
        if ctrl_c.is_reason_of(error):
            interruption = interruption_message(runtime, trainer)
        predicted_memory = None if trainer is None else trainer.memory.predicted
        error = oom_advice.in_words(error, runtime, predicted_memory)
        set_runtime(None)

        # a run refused before its first step: every rank has the error, and all stop with code 2
        is_lost_peer = isinstance(error, collectives.LostPeerError)
        is_refusal = isinstance(error, ConfigError | collectives.PeerError) and not is_lost_peer
        if trainer is None and is_refusal and interruption is None:
            stop_with(error)

        # a job of one process: print a message that explains itself, or raise with the traceback
        if parallel_state.launched_world_size() == 1:
            parallel_state.stop_distributed()
            message = interruption
            if message is None and failure_shutdown.explains_itself(error):
                message = f"stopping, because {error}"
            write_error_file(message or failure_shutdown.message_or_traceback(error))
            if message is None:
                raise
            tolerate_broken_output.print_stderr(message)
            if interruption is not None:
                sys.exit(exit_immediately_on_ctrl_c.CODE)
            sys.exit(failure_shutdown.exit_code_of_failed_run(error))

        # a job of several processes: tell the other ranks
        code = failure_shutdown.report(error, interruption)
    finally:
        # the listener first: the others' errors no longer matter to a rank that is leaving
        if listener is not None:
            listener.stop()
        if trainer is not None:
            trainer.watch.close()
        say_last_words(code or failure_shutdown.exit_code_of(sys.exc_info()[1]))
        if runtime is not None:
            runtime.resources.close()
        set_runtime(None)

    # free the model before the process group goes
    del trainer
    del runtime
    rank_status.enter("ending")
    if code:
        failure_shutdown.leave_job_and_exit(code)
    parallel_state.stop_distributed()


def interruption_message(runtime: Runtime | None, trainer: Trainer | None) -> str:
    """Return the message of an interrupted run: its iteration, and how to resume."""
    save = None if runtime is None else runtime.config.checkpoint.save
    iteration = None if trainer is None else trainer.state.iteration
    return exit_immediately_on_ctrl_c.farewell(iteration, resume_hint(save))


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None) -> None:
    """Do nothing: the log's times count from `pretrain`."""


def update_seqlen_stats_from_cu_seqlens(cu_seqlens: Any) -> None:
    """Do nothing: the FLOPs of a step count whole samples, as a run without packed sequences has them."""


__getattr__ = names_of_megatron(__name__)
