"""The model of a training script in tools that run a trained model: its `model_provider` builds it, as in a run.

settings   the checkpoint's model, data and tokenizer settings, and its flags of the script; the layout of this command line
model      what the provider returns for this rank's stage, with the checkpoint's weights

The provider finds its run (`get_args()`, `get_runtime()`), which has no tokenizer, but the vocabulary's size.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron.core.base.dataclass_flags import ConfigError
from megatron.core.dist_checkpointing import Checkpoint
from megatron.core.inference import SavedSettings
from megatron.core.inference.generate import generation_problems
from megatron.core.inference.load_model import (
    check_parameter_names,
    even_layers,
    fill_stage,
    matmul_modes_here,
    parameters_of,
    refuse_unusable,
)
from megatron.core.models.gpt.gpt_stage import GPTModel
from megatron.core.ops.layout_invariant_dropout import SampleDropoutKeys
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.parallel import collectives
from megatron.core.parallel.accelerator import Device
from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.parallel_config import ParallelConfig
from megatron.core.transformer.layer_parallel_context import LayerContext
from megatron.training.arguments.args_namespace import Arguments
from megatron.training.arguments.command_line import args_of, make_parser, parse_args
from megatron.training.arguments.config import Config
from megatron.training.arguments.load_args_from_checkpoint import words_of_setting
from megatron.training.checkpointing.model_class_and_custom_modules import model_name
from megatron.training.global_vars import Runtime, set_runtime
from megatron.training.initialize import derived_settings
from megatron.training.make_chunks_optimizer_and_pipeline import make_chunks
from megatron.training.training import Script


@dataclass(frozen=True)
class GenerationConfig(Config):
    """The settings of a run, whose layers are divided as evenly as possible, whatever the split in training."""

    @property
    def layer_split(self) -> list[range]:
        num_stages = self.stages.last + 1
        return [even_layers(self.transformer.all_layers, stage, num_stages) for stage in range(num_stages)]


class GenerationRuntime(Runtime):
    """The parts of a run, for layers that see texts of any length, each from its own position 0."""

    @property
    def layer_context(self) -> LayerContext:
        context = super().layer_context
        return replace(context, cp=replace(context.cp, longest=None), restarts_positions=False)


def load_script_model(
    script: Script,
    checkpoint: Checkpoint,
    saved: SavedSettings,
    parallel: ParallelConfig,
    mesh: Mesh,
    device: Device,
    base: Checkpoint | None = None,
) -> nn.Module:
    """Return this rank's stage of the script's model with the checkpoint's weights, in evaluation mode.

    base: has the frozen weights of a checkpoint of adapters alone. Every rank must call. Raises ConfigError if the script
    builds another model than the checkpoint's, or one that cannot generate text.
    """
    refuse_unusable(checkpoint, saved.transformer, base)
    world = mesh["world"]
    torch_device = device.torch_device
    matmul_modes = matmul_modes_here(saved.transformer, mesh, torch_device)

    # the run that the provider finds
    config, args = settings_of_script(script, checkpoint.state, saved, parallel, str(checkpoint.folder))
    args = args.and_also(derived_settings(config, mesh, None))
    keys = SampleDropoutKeys(config.training.seed)
    runtime = GenerationRuntime(config, args, mesh, device, None, keys, WeightGradStore(), matmul_modes=matmul_modes)
    global_state = get_global_state()
    global_state.device = torch_device
    global_state.sequence_parallel = False
    global_state.matmul_modes = matmul_modes
    set_runtime(runtime)

    # this rank's stage; a rank whose provider fails stops all
    with collectives.raise_together(world, torch_device):
        (model,) = make_chunks(script.model_provider, runtime).values()
        if problems := generation_problems(model):
            raise ConfigError(problems)

    # refuse another model
    name = model_name([model], mesh["pp"], torch_device)
    saved_name = checkpoint.state.get("model", GPTModel.__name__)
    if name != saved_name:
        raise ConfigError(
            f"{checkpoint.folder} contains a {saved_name}, and the script of --model builds a {name}; give the script that "
            "trained the model"
        )
    texts = collectives.all_gather_texts(json.dumps(parameters_of(model)), mesh["pp"], torch_device)
    check_parameter_names(checkpoint, [parameter for text in texts for parameter in json.loads(text)], name, base)
    return fill_stage(checkpoint, model, mesh, torch_device, base)


def settings_of_script(
    script: Script, state: dict[str, Any], saved: SavedSettings, parallel: ParallelConfig, source: str
) -> tuple[GenerationConfig, Arguments]:
    """Return the settings of a run of the script with the checkpoint's model in this layout, and its `get_args()`.

    source: the checkpoint's name in errors. Raises ConfigError if the script lacks a flag that shapes the model.
    """
    # the script's own flags, as words that its parser reads, so that each has its type
    of_model = state["config"].get("own_model", {})
    own = state["config"].get("own", {}) | of_model
    parser = make_parser(script.extra_args_provider, script.args_defaults)
    words = []
    for name in dict.fromkeys(action.dest for action in parser.own):
        if name in own:
            words += words_of_setting(name, own[name], parser)
    parsed = parse_args(words, script.extra_args_provider, script.args_defaults)
    now = parsed.config.own.as_json()["own_model"]
    problems = []
    for name, value in of_model.items():
        if name not in now:
            problems.append(f"{source} has the setting {name} {value}, and the script of --model has no such flag")
        elif now[name] != value:
            problems.append(f"{source} has the setting {name} {value}, which in the script of --model is {now[name]}")
    if problems:
        raise ConfigError([f"{problem}; give the script that trained the model" for problem in problems])

    # the checkpoint's settings, in this layout
    components = {name: getattr(parsed.config, name) for name in parsed.config.component_values()}
    components |= {"transformer": saved.transformer, "data": saved.data, "parallel": parallel}
    components["training"] = replace(parsed.config.training, micro_batch_size=1)
    components["tokenizer"] = replace(saved.tokenizer, model_vocab_size=saved.vocab_size)
    config = GenerationConfig(**components, own=parsed.config.own)
    return config, args_of(config, vars(parsed.args))
