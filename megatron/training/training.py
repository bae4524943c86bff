"""The entry of all top-level scripts: a run from its command line to its end.

pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    initialize      settings, processes, device, tokenizer              initialize.py
    build           model chunks, buffers, optimizer, data, checkpoint  Trainer(...), trainer.py
    run             the steps, then validation and test                 Trainer.run
    leave           in order, whatever happened                         failure_shutdown.py
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from megatron.core import parallel_state
from megatron.core.base import output_streams, rank_status
from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.base.error_reporting import write_error_file
from megatron.core.base.lazy_imports import names_of_megatron
from megatron.core.base.unsupported_arguments import accepts_defaults_only
from megatron.core.enums import ModelType
from megatron.core.models.common.model_rules import NO_RULES, ModelRules
from megatron.core.optimizer.param_groups import GroupRule, default_group
from megatron.core.parallel import collectives
from megatron.core.pipeline_parallel.loss_func_results import ForwardStep
from megatron.training.arguments.checkpoint_to_load import where_to_go_on
from megatron.training.arguments.command_line import ExtraArgs
from megatron.training.build import DatasetsProvider, build_train_valid_test_data_iterators, setup_model_and_optimizer
from megatron.training.fault_tolerance import failure_shutdown, hang_watch, keyboard_interrupt, launcher_watch
from megatron.training.fault_tolerance.exit_conditions import stop_listening
from megatron.training.global_vars import Runtime, set_runtime
from megatron.training.initialize import initialize_megatron, stop_with
from megatron.training.memory import oom_advice
from megatron.training.model_chunks import ModelProvider
from megatron.training.trainer import NonLossData, Trainer

__all__ = ["Trainer", "build_train_valid_test_data_iterators", "pretrain", "setup_model_and_optimizer"]


class Script(NamedTuple):
    """What a top-level script gives `pretrain`, under the same names and in one order."""

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


@accepts_defaults_only(store=None, inprocess_call_wrapper=None)
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
) -> None:
    """Train a model from the command line's settings. Every process of the job calls it.

    Arguments stand in Megatron's order; the order of Megatron 2.5, without model_type, works too.
    Invalid settings end all processes with code 2. A later error ends them with code 1, or 3 if numbers are wrong, and
    with the
    message of the failing rank.
    A job of one process raises that error, unless the message alone says what to change (for example for a NaN loss).

    model_type: encoder_and_decoder has a second stack of layers (--decoder-num-layers), which the pipeline's stages
    share too;
        add_encoder and add_decoder say which of the stacks a stage has layers of

    train_valid_test_dataset_provider([n_train, n_valid, n_test]) -> three data sets, or None in place of a set. A data
    set has
        a length, and its items are dictionaries of arrays. Every rank calls the provider, whatever its `is_distributed`
        says.
    model_provider(pre_process, post_process[, vp_stage][, add_encoder, add_decoder]) -> this stage's part of the model
    forward_step_func(data_iterator, model) -> (output, loss_func); loss_func(output) -> (loss_sum, num_tokens, report)
    extra_args_provider(parser) adds the script's own flags; args_defaults: defaults of settings, by name
    process_non_loss_data_func(data, iteration, writer=None) is called on the last rank after each validation. data is
    the result
        of non_loss_data_func(model chunks), or a list of loss_func(output, non_loss_data=True) over the microbatches of
        a batch.
    get_embedding_ranks, get_position_embedding_ranks: as in `initialize_model_parallel`
    rules: the model's own rules about settings, beside the rules for every run
    group_of(name, placement) -> the group that sets how this parameter is updated
    """
    if forward_step_func is None or not isinstance(model_type, ModelType):
        # Megatron 2.5: pretrain(datasets_provider, model_provider, forward_step, extra_args_provider, args_defaults).
        args_defaults, process_non_loss_data_func = process_non_loss_data_func or args_defaults, None
        extra_args_provider, forward_step_func = forward_step_func or extra_args_provider, model_type
        if isinstance(forward_step_func, ModelType) or not callable(forward_step_func):
            expected = "forward_step(data_iterator, model) -> (output, loss_func)"
            raise TypeError(f"pretrain() needs {expected}, after the model type")
    if (
        model_type is ModelType.encoder_and_decoder
    ):  # has a decoder, as long as the encoder unless the flag says another
        args_defaults = {"decoder_num_layers": 0, **(args_defaults or {})}
    ranks_of = {
        "get_embedding_ranks": get_embedding_ranks,
        "get_position_embedding_ranks": get_position_embedding_ranks,
    }
    non_loss = NonLossData(process_non_loss_data_func, non_loss_data_func)
    functions = train_valid_test_dataset_provider, model_provider, forward_step_func, extra_args_provider
    run_script(Script(*functions, args_defaults, ranks_of, non_loss, rules, group_of, argv))


def run_script(script: Script) -> None:
    """Train as the script says, to the end. `pretrain` calls it by this name, which tools replace to read a script alone."""
    began = time.monotonic()
    settings = script.extra_args_provider, script.args_defaults
    initialize = partial(initialize_megatron, *settings, argv=script.argv, rules=script.rules, **script.ranks_of)
    parts = script.train_valid_test_datasets_provider, script.model_provider, script.forward_step, script.group_of

    def make_trainer(runtime: Runtime) -> Trainer:
        return Trainer(runtime, *parts, began, script.non_loss)

    rank, ranks = parallel_state.launched_rank(), parallel_state.launched_world_size()
    output_streams.keep_running(rank)
    launcher_watch.end_with_launcher(rank)
    with keyboard_interrupt.Interrupt(rank) as ctrl_c, hang_watch.watching(rank, ranks):
        try:
            _run(initialize, make_trainer, ctrl_c)
        finally:
            stop_listening()


def _run(
    initialize: Callable[[], Runtime], make_trainer: Callable[[Runtime], Trainer], ctrl_c: keyboard_interrupt.Interrupt
) -> None:
    """Run one job. Whatever ends it, every rank leaves in order."""
    runtime = trainer = None
    listener = None
    code = 0
    try:
        runtime = initialize()
        listener = failure_shutdown.listen()
        trainer = make_trainer(runtime)
        trainer.run()
    except (Exception, KeyboardInterrupt) as error:
        hang_watch.wait_for_verdict()
        farewell = last_words(runtime, trainer) if ctrl_c.is_reason_of(error) else None
        error = oom_advice.in_words(error, runtime, None if trainer is None else trainer.memory.predicted)
        set_runtime(None)
        is_refusal = isinstance(error, ConfigError | collectives.PeerError) and not isinstance(
            error, collectives.LostPeerError
        )
        if trainer is None and is_refusal and farewell is None:
            stop_with(error)
        if parallel_state.launched_world_size() == 1:
            parallel_state.stop_distributed()
            told = farewell or (f"stopping, because {error}" if failure_shutdown.explains_itself(error) else None)
            write_error_file(told or failure_shutdown.account_of(error))
            if told is None:
                raise
            output_streams.print_stderr(told)
            sys.exit(failure_shutdown.code_of(error) if farewell is None else keyboard_interrupt.CODE)
        code = failure_shutdown.report(error, farewell)
    finally:
        if listener is not None:
            listener.stop()
        if trainer is not None:
            trainer.watch.close()
        if runtime is not None:
            runtime.held.close()
        set_runtime(None)
    del trainer, runtime
    rank_status.enter("ending")
    if code:
        failure_shutdown.leave(code)
    parallel_state.stop_distributed()


def last_words(runtime: Runtime | None, trainer: Trainer | None) -> str:
    """The message of an interrupted run: its iteration, and how to resume."""
    save = None if runtime is None else runtime.config.checkpoint.save
    return keyboard_interrupt.farewell(None if trainer is None else trainer.state.iteration, where_to_go_on(save))


__getattr__ = names_of_megatron(__name__)
