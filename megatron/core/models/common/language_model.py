"""The common part of language models: embedding on the first stage, layers, output layer on the last stage."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from megatron.core.models.common.embeddings.embedding import Embedding
from megatron.core.models.common.model_rules import NO_RULES
from megatron.core.models.common.vocab_parallel_lm_head import LanguageModelHead
from megatron.core.ops.attention.kv_cache import AttentionCache
from megatron.core.ops.compile.compiled_region import compiles
from megatron.core.ops.count_flops_by_module import Flops, LayerInput, flops_of, further_flops
from megatron.core.pipeline_parallel.stage_transport import TensorSpec
from megatron.core.tensor_parallel import autograd_collectives
from megatron.core.tensor_parallel.cross_entropy import losses_and_cross_entropy
from megatron.core.transformer.layer_parallel_context import LayerContext, MakePart
from megatron.core.transformer.model_config import ModelConfig
from megatron.core.transformer.tiled_compute import declare_tiled_use
from megatron.core.transformer.transformer_block import TransformerBlock


class TransformerLanguageModel(nn.Module):
    """One pipeline stage of a language model.

    forward(tokens [b, s], position_ids [b, s], mask, token_types [b, s], cache) -> hidden states [s, b, h] ([s/t, b, h]
    under sequence parallelism). mask: a `Mask`; a tensor is bool [b or 1, 1, s or 1, s], True where masked; not None in
    training if `context.masks_documents`. Without `pre_process` it starts from the hidden states of the previous stage, set by
    `set_input_tensor`. With `post_process`, `logits` applies the output layer. All ranks of this stage in one replica must call.

    spec, make_layer, layer_config: how the layers are built, see `TransformerBlock`, whose `config` is layer_config.
    positions: rows of a learned position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        positions: int,
        layers: Iterable[int],
        context: LayerContext,
        pre_process: bool = True,
        post_process: bool = True,
        num_tokentypes: int = 0,
        spec: Any = None,
        make_layer: MakePart | None = None,
        layer_config: Any = None,
    ):
        super().__init__()
        tied = not config.untie_embeddings_and_output_weights
        self.pre_process = pre_process
        self.post_process = post_process
        self.embedding = None
        self.output_layer = None
        if pre_process or (post_process and tied):
            self.embedding = Embedding(
                config, vocab_size, positions, context, num_tokentypes=num_tokentypes, tokens_only=not pre_process
            )
        self.decoder = TransformerBlock(
            config if layer_config is None else layer_config,
            spec,
            post_process=post_process,
            layers=layers,
            layer_context=context,
            settings=config,
            make_layer=make_layer,
        )
        if post_process:
            self.output_layer = LanguageModelHead(
                config, vocab_size, context, shares_embedding_weight=tied and pre_process
            )
        if tied and post_process:
            weight = self.embedding.word_embeddings.weight
            declare_tiled_use(weight, config.tiled_loss)
            if pre_process:
                weight.num_grads_per_backward = 1 + config.tiled_loss  # the lookup, and each tile of the output layer
                weight.is_tied = True  # the output layer reads it outside its own module
        self._input_tensor: Tensor | None = None
        self.restarts_positions = context.restarts_positions
        self.masks_documents = context.masks_documents

    def set_input_tensor(self, x: Tensor | None) -> None:
        """Set the hidden states from which the next forward starts, on every stage but the first.

        x: [s, b, h] ([s/t, b, h] under sequence parallelism).
        """
        self._input_tensor = x

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        mask: Tensor | None = None,
        token_types: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Return the hidden states after the stage's layers: [s, b, h] ([s/t, b, h] under sequence parallelism)."""
        if self.masks_documents and self.training and mask is None:
            raise ValueError(
                "--reset-attention-mask and --dataloader-inter-document-masking keep attention within documents, so in training "
                "each pipeline stage needs the attention_mask of its batch, but the model was given none. A script whose "
                "stages between the first and the last read no batch can take at most 2 stages; with more, read the batch on "
                "every stage, as forward_step of pretrain_gpt.py does"
            )
        x = self.embedding(tokens, position_ids, token_types) if self.pre_process else self._input_tensor
        if type(self.decoder) is TransformerBlock:
            return self.decoder(x, mask, inference_context=cache, position_ids=position_ids)
        # A fork's `decoder` is called as a `ParallelTransformer` is; it need not take positions, unless they restart.
        options = (position_ids,) if self.restarts_positions else ()
        return self.decoder(x, mask, cache, *options)

    def count_flops(self, x: LayerInput, transform: nn.Module | None = None) -> Flops:
        """transform: what the model computes between the layers and the output layer."""
        if self.pre_process:
            x = x.after(self.embedding)
        last = x.after(self.decoder)
        flops = flops_of(self.decoder, x) + flops_of(transform, last)
        flops += head_flops(self.output_layer, self.embedding, last.after(transform))
        return flops + further_flops(self, last, (self.decoder, transform, self.output_layer))

    def logits(self, x: Tensor, *labels_and_loss: Any) -> Tensor:
        """Apply the output layer of the last stage to x [s, b, h]: -> logits [s, b, padded vocabulary / t].

        labels_and_loss: see `output_logits`. Every rank of tp must call.
        """
        return output_logits(self.output_layer, self.embedding, x, *labels_and_loss)


def output_logits(head: LanguageModelHead, embedding: Embedding | None, x: Tensor, *labels_and_loss: Any) -> Tensor:
    """Return the logits [s, b, padded vocabulary / t] of hidden states x.

    x: [s, b, h] ([s/t, b, h] under sequence parallelism). labels_and_loss: labels [s, b] and loss(logits, labels)
    -> [s, b, ..], whose result is returned then. embedding: has the weight, if the head has none of its own. Every rank
    of tp must call.
    """
    # ZeRO stage 3 would gather a weight that is passed in vain
    weight = None if head.weight is not None else embedding.word_embeddings.weight
    if labels_and_loss and head.tiles == 1:
        # the loss is taken outside the head, so that a hook on the output layer gets the logits
        labels, loss = labels_and_loss
        return loss(head(x, weight), labels)
    return head(x, weight, *labels_and_loss)


def head_flops(head: nn.Module | None, embedding: Embedding | None, x: LayerInput) -> Flops:
    """Return the FLOPs of an output layer, whose weight is the embedding's if it has none of its own. None: no head."""
    if isinstance(head, LanguageModelHead) and head.weight is None:
        return flops_of(head, x, tied_weight=embedding.word_embeddings.weight)
    return flops_of(head, x)


class LanguageModelStage(nn.Module):
    """One pipeline stage of a model around a language model; a subclass adds head and loss.

    parallel_output: without labels, forward returns this rank's part of the vocabulary; False: all of it on every rank.
    """

    rules = NO_RULES
    body: Callable[..., nn.Module] = TransformerLanguageModel  # the class between token ids and logits
    parallel_output = True
    returns_contiguous = False  # forward returns contiguous losses, for scripts that flatten them by a view

    def __init__(self, config: ModelConfig, *, vocab_size: int, context: LayerContext, **parts: Any):
        """parts: further arguments of the `body`."""
        super().__init__()
        self.config = config  # Megatron's classes overwrite it with Megatron's TransformerConfig
        self.settings = config
        self.context = context
        self.aux_losses = context.aux_losses
        self.aux_losses.num_layers = config.all_layers
        self.aux_losses.declare(*config.aux_loss_names)
        self.vocab_size = vocab_size
        self.axis = context.tp.axis
        self.language_model = self.body(config, vocab_size=vocab_size, context=context, **parts)
        self.pre_process = self.language_model.pre_process
        self.post_process = self.language_model.post_process

    def set_input_tensor(self, x: Tensor | tuple[Tensor, ...] | None) -> None:
        """Set the tensors of `boundary` from which the next forward starts, on every stage but the first.

        x: one tensor [s, b, h] ([s/t, b, h] under sequence parallelism), or a tuple if the boundary has several.
        """
        self.language_model.set_input_tensor(x)

    def losses(self, logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> Tensor:
        """Return the cross entropy of each token [s, b], from logits [s, b, v/t] and labels [s, b].

        In training with label smoothing or z-loss the result is [s, b, 2]: with these terms and without. Evaluation has
        no such terms. Every rank of tp must call. Raises ValueError if logits and labels differ in [s, b], and
        ConfigError for a label outside the vocabulary. overwrite: the loss may use the memory of the logits, which nobody
        else may read after this call.
        """
        config = self.settings
        terms = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss_coeff} if self.training else {}
        compiled = compiles(config, logits.device)
        loss, cross_entropy = losses_and_cross_entropy(
            logits, labels, self.axis, self.vocab_size, **terms, compiled=compiled, overwrite=overwrite
        )
        return loss if cross_entropy is loss else torch.stack((loss, cross_entropy), dim=-1)

    def losses_of_own_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return `losses` of the logits that forward has just computed; arguments, result and errors are its own.

        Their memory is used, unless code of a script may have kept them: its own `losses`, or its class of a module of
        `modules_of_logits` or its hook on one.
        """
        if type(self).losses is not LanguageModelStage.losses:
            return self.losses(logits, labels)
        return self.losses(logits, labels, overwrite=not any(map(_may_keep_its_output, self.modules_of_logits())))

    def modules_of_logits(self) -> tuple[nn.Module, ...]:
        """Return the modules that return the logits, on the last stage."""
        return self.language_model, self.language_model.output_layer

    def batch_first(self, losses: Tensor) -> Tensor:
        """Return the result of `losses`, [s, b] or [s, b, 2], as [b, s], as forward returns it.

        For [s, b, 2] it is the loss of training; the plain cross entropy [b, s] is its attribute `cross_entropy`, which
        a loss function reports (`megatron.training.batch_utils.lm_loss_and_objective`).
        """
        if losses.dim() == 2:
            return self._transposed(losses)
        loss, cross_entropy = losses.unbind(-1)  # [s, b] each
        loss = self._transposed(loss.contiguous())
        loss.cross_entropy = self._transposed(cross_entropy.contiguous().detach())
        return loss

    def _transposed(self, losses: Tensor) -> Tensor:
        """Transpose [s, b] to [b, s]: a view, so that a sum adds in the order of the sequence, or a contiguous copy."""
        return losses.t().contiguous() if self.returns_contiguous else losses.t()

    def batch_first_logits(self, logits: Tensor) -> Tensor:
        """Return logits [s, b, v/t] as forward does: [b, s, v/t], or without `parallel_output` [b, s, v].

        Without `parallel_output` every rank has all of them, and every rank of tp must call.
        """
        if not self.parallel_output:
            logits = autograd_collectives.gather_last(logits, self.axis)  # [s, b, v]
        return logits.transpose(0, 1).contiguous()  # scripts flatten them by a view

    def boundary(self, micro_batch_size: int, seq_length: int) -> tuple[TensorSpec, ...]:
        """Return shape and dtype of the tensors that a stage sends to the next: this rank's rows of [s, b, h]."""
        return (self.context.hidden_states(self.settings, micro_batch_size, seq_length),)


def _may_keep_its_output(module: nn.Module) -> bool:
    """Whether a forward of the module runs code of a script. Ours, such as the hooks of ZeRO stage 3, keeps no output."""
    hooks = (*module._forward_hooks.values(), *_global_forward_hooks.values())
    code = (type(module), *(hook.func if isinstance(hook, partial) else hook for hook in hooks))
    return not all(str(each.__module__).startswith("megatron.") for each in code)
