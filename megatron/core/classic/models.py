"""`GPTModel` and `BertModel` of Megatron core, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from torch import Tensor, nn

from megatron.core.base.signatures import takes
from megatron.core.classic.layers import layers_of_stage, make_layer_of
from megatron.core.classic.modules import MegatronModule, context_of, settings_of
from megatron.core.models.bert import bert_stage
from megatron.core.models.gpt import gpt_stage
from megatron.core.parallel.global_state import current
from megatron.core.parallel.rendezvous import join_alone


class ModelOfMegatron(MegatronModule):
    """What Megatron's models have beside ours, which a subclass names after this class.

    options: settings by our names, and `tied`. heads: our models' further arguments. Inside a run the vocabulary is the run's if
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


_NOT_BUILT = {  # Megatron's other arguments of a GPT -> the value that changes nothing here
    "seq_len_interpolation_factor": None,
    "rope_scaling": False,
    "scatter_embedding_sequence_parallel": True,
    "mtp_block_spec": None,
}
_WITHOUT_EFFECT = ("rope_scaling_factor", "pg_collection", "model_comm_pgs")


def _refuse(others: dict[str, Any]) -> None:
    """Raises for arguments that are not Megatron's, and for values that are not built."""
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT and (name not in _NOT_BUILT or value != _NOT_BUILT[name]):
            raise TypeError(f"GPTModel: {name}={value!r} is not built; leave it out")


class GPTModel(ModelOfMegatron, gpt_stage.GPTModel):
    """One stage of a GPT; `pre_process` and `post_process` say whether it is the first and the last.

    forward(input_ids, position_ids, attention_mask, labels=None) as `megatron.model.GPTModel`'s.
    """

    def __init__(
        self,
        config: Any,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: int = 10000,
        *,
        vp_stage: int | None = None,
        **others: Any,
    ):
        del fp16_lm_cross_entropy  # the loss is taken in float32
        _refuse(others)
        options = {"position_embedding_type": position_embedding_type, "rotary_percent": rotary_percent}
        options |= {"tied": share_embeddings_and_output_weights, "rotary_base": float(rotary_base)}
        sizes, ends = (vocab_size, max_sequence_length), (pre_process, post_process)
        super().__init__(config, transformer_layer_spec, *sizes, ends, parallel_output, vp_stage, options)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if decoder_input is not None:
            raise NotImplementedError(
                "decoder_input: hidden states in place of tokens are not built yet; pass input_ids"
            )
        return super().forward(input_ids, position_ids, attention_mask, labels)


class BertModel(ModelOfMegatron, bert_stage.BertModel):
    """One stage of a BERT.

    forward(input_ids, attention_mask, tokentype_ids=None, lm_labels=None) as `megatron.model.BertModel`'s.
    """

    @takes(pg_collection=None)
    def __init__(
        self,
        config: Any,
        num_tokentypes: int,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: None = None,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
    ):
        del fp16_lm_cross_entropy
        if return_embeddings or seq_len_interpolation_factor:
            raise NotImplementedError(
                "return_embeddings (a BERT as an encoder of texts) and seq_len_interpolation_factor are not built yet; "
                "leave them out"
            )
        options = {"position_embedding_type": position_embedding_type, "rotary_percent": rotary_percent}
        options |= {"tied": share_embeddings_and_output_weights}
        heads = {"num_tokentypes": num_tokentypes, "add_binary_head": add_binary_head}
        sizes, ends = (vocab_size, max_sequence_length), (pre_process, post_process)
        super().__init__(config, transformer_layer_spec, *sizes, ends, parallel_output, vp_stage, options, **heads)
