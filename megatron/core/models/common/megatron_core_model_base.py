"""The common part of Megatron core's `GPTModel`, `BertModel`, `T5Model`.

They are built from a `TransformerConfig` on the current mesh.
"""

from typing import Any

from torch import nn

from megatron.core.parallel.global_state import get_global_state
from megatron.core.parallel.init_and_destroy_distributed import join_alone
from megatron.core.transformer.module import MegatronModule, of_process
from megatron.core.transformer.transformer_layer import layers_of_stage


class MegatronCoreModel(MegatronModule):
    """The common constructor and attributes of Megatron core's models.

    A subclass names one of our stages after this class among its bases.

    options: fields of our ModelConfig, by name. heads: further arguments of our stage. pre_process, post_process:
    whether this stage is the first, the last. Inside a run, `vocab_size` may be the run's padded size; the model then
    has the run's vocabulary, whose padding takes no part in the softmax.
    """

    returns_contiguous = True

    def __init__(
        self,
        config: Any,
        spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        *,
        pre_process: bool,
        post_process: bool,
        parallel_output: bool,
        vp_stage: int | None,
        options: dict[str, Any],
        **heads: Any,
    ):
        state = get_global_state()
        run = state.run
        if vp_stage is not None:
            state.virtual_rank = vp_stage
        join_alone()
        multiple = 1
        if run is not None and vocab_size == run.args.padded_vocab_size:
            vocab_size = run.vocab_size
            multiple = run.config.transformer.make_vocab_size_divisible_by
        model_config, layer_context = of_process(config, make_vocab_size_divisible_by=multiple, **options)
        super(MegatronModule, self).__init__(  # our stage, which comes after MegatronModule among the bases
            model_config,
            vocab_size=vocab_size,
            positions=max_sequence_length,
            context=layer_context,
            **self._layers(spec, config),
            pre_process=pre_process,
            post_process=post_process,
            **heads,
        )
        self.config = config
        self.vp_stage = vp_stage
        self.max_sequence_length = max_sequence_length
        self.parallel_output = parallel_output

    def _layers(self, spec: Any, config: Any) -> dict[str, Any]:
        """Return the arguments of our stage that describe its layers."""
        return {"layers": layers_of_stage(config), "spec": spec, "layer_config": config}

    @property
    def decoder(self) -> nn.Module:
        return self.language_model.decoder

    encoder = decoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the hidden states from which the next forward starts, or a list of them.

        input_tensor: [s, b, h] ([s/t, b, h] under sequence parallelism).
        """
        x = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language_model.set_input_tensor(x)
        self.decoder.input_tensor = x
