"""What `GPTModel`, `BertModel` and `T5Model` of Megatron have in common: built from a `TransformerConfig` and the
current mesh."""

from typing import Any

from torch import nn

from megatron.core.parallel.global_state import current
from megatron.core.parallel.initialize_distributed import join_alone
from megatron.core.transformer.module import MegatronModule, context_of, settings_of
from megatron.core.transformer.transformer_block import make_layer_of
from megatron.core.transformer.transformer_layer import layers_of_stage


class ModelOfMegatron(MegatronModule):
    """What Megatron's models have beside ours, which a subclass names after this class.

    options: settings by our names, and `tied`. heads: our models' further arguments. Inside a run the vocabulary is the
    run's if
    `vocab_size` is its padded size: padding takes no part in the softmax.
    """

    flattens = True

    def __init__(
        self,
        config: Any,
        spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        ends: tuple[bool, bool],
        parallel_output: bool,
        vp_stage: int | None,
        options: dict[str, Any],
        **heads: Any,
    ):
        here = current()
        run, here.virtual_rank = here.run, here.virtual_rank if vp_stage is None else vp_stage
        join_alone()
        is_padded = run is not None and vocab_size == run.args.padded_vocab_size
        multiple = run.config.transformer.make_vocab_size_divisible_by if is_padded else 1
        options |= {"untie_embeddings_and_output_weights": not options.pop("tied")}
        ours = settings_of(config, make_vocab_size_divisible_by=multiple, **options)
        super(MegatronModule, self).__init__(
            ours,
            vocab_size=run.vocab_size if is_padded else vocab_size,
            positions=max_sequence_length,
            context=context_of(ours, config),
            **self._layers(spec, config),
            pre_process=ends[0],
            post_process=ends[1],
            **heads,
        )
        self.config, self.max_sequence_length = config, max_sequence_length
        self.parallel_output = parallel_output

    def _layers(self, spec: Any, config: Any) -> dict[str, Any]:
        return {"layers": layers_of_stage(config), "make_layer": make_layer_of(spec, config)}

    @property
    def decoder(self) -> nn.Module:
        return self.language_model.decoder

    encoder = decoder

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The hidden states that the next forward starts from, or a list of them."""
        x = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language_model.set_input_tensor(x)
        self.decoder.input_tensor = x
