"""`GPTModel` and `BertModel` of Megatron core, built from a `TransformerConfig`, a layer spec and the current mesh."""

from typing import Any

from torch import Tensor, nn

from megatron.core.classic.layers import layers_of_stage, make_layer_of
from megatron.core.classic.modules import MegatronModule, context_of, settings_of
from megatron.core.current_mesh import current
from megatron.core.job.processes import join_alone
from megatron.core.models import bert_model, gpt_model
from megatron.core.tensor_parallel import mappings


def of_stage(
    config: Any, spec: Any, vocab_size: int, max_sequence_length: int, options: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of our models for the stage that is being built. options: Megatron's further arguments of a model.

    Inside a run the vocabulary is the run's if `vocab_size` is its padded size: padding takes no part in the softmax.
    """
    here, chunk = current(), options.pop("vp_stage", None)
    run, here.virtual_rank = here.run, here.virtual_rank if chunk is None else chunk
    join_alone()
    is_padded = run is not None and vocab_size == run.args.padded_vocab_size
    options["make_vocab_size_divisible_by"] = run.config.transformer.make_vocab_size_divisible_by if is_padded else 1
    ours = settings_of(config, **options)
    return {
        "config": ours,
        "vocab_size": run.vocab_size if is_padded else vocab_size,
        "positions": max_sequence_length,
        "layers": layers_of_stage(config),
        "context": context_of(ours, config),
        "make_layer": make_layer_of(spec, config),
    }


class _Stage(MegatronModule):
    """What Megatron's models have beside ours."""

    def _take(self, config: Any, max_sequence_length: int, parallel_output: bool) -> None:
        self.config = config
        self.max_sequence_length, self.parallel_output = max_sequence_length, parallel_output
        self.pre_process, self.post_process = self.language_model.pre_process, self.language_model.post_process

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


def _named(tied: bool, positions: str, **more: Any) -> dict[str, Any]:
    """Options of Megatron's models by our names."""
    return {"untie_embeddings_and_output_weights": not tied, "position_embedding_type": positions, **more}


class GPTModel(_Stage, gpt_model.GPTModel):
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
        rotary = {"rotary_percent": rotary_percent, "rotary_base": float(rotary_base)}
        options = _named(share_embeddings_and_output_weights, position_embedding_type, **rotary, vp_stage=vp_stage)
        parts = of_stage(config, transformer_layer_spec, vocab_size, max_sequence_length, options)
        gpt_model.GPTModel.__init__(self, **parts, pre_process=pre_process, post_process=post_process)
        self._take(config, max_sequence_length, parallel_output)

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
        result = super().forward(input_ids, position_ids, attention_mask, labels)
        is_whole = not self.post_process or labels is not None or self.parallel_output
        return (
            result if is_whole else mappings.gather_last(result, self.axis)
        ).contiguous()  # scripts flatten it by a view


class BertModel(_Stage, bert_model.BertModel):
    """One stage of a BERT.

    forward(input_ids, attention_mask, tokentype_ids=None, lm_labels=None) as `megatron.model.BertModel`'s.
    """

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
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        *,
        vp_stage: int | None = None,
    ):
        del fp16_lm_cross_entropy
        if return_embeddings:
            raise NotImplementedError("return_embeddings: a BERT as an encoder of texts is not built yet; leave it out")
        rotary = {"rotary_percent": rotary_percent}
        options = _named(share_embeddings_and_output_weights, position_embedding_type, **rotary, vp_stage=vp_stage)
        parts = of_stage(config, transformer_layer_spec, vocab_size, max_sequence_length, options)
        heads = {"num_tokentypes": num_tokentypes, "add_binary_head": add_binary_head}
        bert_model.BertModel.__init__(self, **parts, **heads, pre_process=pre_process, post_process=post_process)
        self._take(config, max_sequence_length, parallel_output)

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
    ) -> Any:
        result = super().forward(input_ids, attention_mask, tokentype_ids, lm_labels)
        if not self.post_process:
            return result
        words, order = result
        is_whole = lm_labels is not None or self.parallel_output
        return (words if is_whole else mappings.gather_last(words, self.axis)).contiguous(), order
