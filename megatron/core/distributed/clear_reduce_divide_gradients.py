"""The protocol of one step's gradients, for every kind of loop: cleared, scaled, accumulated, reduced, divided.

    begin(num_microbatches)              clear the gradients of the last step
    weigh_aux_losses(tokens, ...)        of a model with auxiliary losses, before the first forward
    objective_scale                      multiplies each objective before its backward
    begin_microbatch, start_grad_reduce  around the forwards and backwards, of the chunks themselves
    finish(tokens)                       wait for the reduction of all chunks
    divisor                              the gradients divided by it are those of the mean loss

Three loops follow it, and differ in who divides:

    megatron.training.step.train_step            the optimizer, whose factor is clipping / divisor
    core.pipeline_parallel.schedules.run_step    `divide_gradients`: a script's optimizer reads `.grad` or `main_grad`
    megatron.training.zero_engine_for_any_module.Engine         the optimizer, as the first; the script runs forward and backward

Division comes last because the tokens of a step are known after its last microbatch.
"""

from collections.abc import Sequence

from torch import nn

from megatron.core.ops.main_grad_interface import DataParallelChunkInterface


class GradientStep:
    """The gradients of one step of this rank's model chunks.

    chunks: each a DistributedDataParallel, or a plain module whose gradients are in `.grad`.
    loss_scale: multiplies the loss, so that gradients do not leave float16's range.
    nominal_tokens: objectives are divided by it before the backward, and the gradients multiplied by it at the end, if
        a sum over all tokens of a step would leave that range. It need not be the number of tokens.
    keeps_loss_scale: the divisor leaves the loss scale in the gradients, for an optimizer that removes it.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        *,
        loss_scale: float = 1.0,
        nominal_tokens: float = 1.0,
        keeps_loss_scale: bool = False,
    ):
        self.chunks = list(chunks)
        self.loss_scale = loss_scale
        self.nominal_tokens = nominal_tokens
        self.keeps_loss_scale = keeps_loss_scale
        self.aux_weight = 0.0  # of coefficient x value of an auxiliary loss in one microbatch of one replica, in tokens
        self.weighed_tokens: float | None = None  # the step's tokens that auxiliary losses were weighed against
        self._tokens: float | None = None  # of the step, over all ranks; None: not finished

    @property
    def objective_scale(self) -> float:
        """What multiplies an objective, the sum of the losses of a microbatch's tokens, before its backward."""
        return self.loss_scale / self.nominal_tokens

    def begin(self, num_microbatches: int | None) -> None:
        """Forget the gradients of the last step, which may have ended in an error. Every rank must call.

        num_microbatches: per rank, of this step; see `DistributedDataParallel.zero_grad_buffer`.
        """
        self._tokens = None
        for chunk in self._in_buffers():
            chunk.zero_grad_buffer(num_microbatches)

    def weigh_aux_losses(self, tokens: float, num_microbatches: int) -> None:
        """Weigh auxiliary losses so that the objective has their mean over microbatches. Called before the first forward.

        tokens: those that `finish` will be told, as far as known. num_microbatches: of the step, over all replicas.
        """
        self.weighed_tokens = tokens
        self.aux_weight = (tokens or 1.0) / num_microbatches

    def finish(self, tokens: float) -> None:
        """Wait for the sums of all gradients over the ranks, those of tied embeddings too. Every rank must call.

        tokens: what the sum of the step's objectives is to be divided by, equal on all ranks. 0: a step that counts
        nothing has no mean, and is not divided.
        """
        for chunk in self._in_buffers():
            chunk.finish_grad_reduce()
        self._tokens = tokens or 1.0

    @property
    def divisor(self) -> float:
        """What the gradients in the buffers are to be divided by, after `finish`."""
        assert self._tokens is not None, "the divisor was asked for before finish()"
        scale = 1.0 if self.keeps_loss_scale else self.loss_scale
        return self._tokens * (scale / self.nominal_tokens)

    def divide_gradients(self) -> None:
        """Divide the gradients where they are: in the buffers, or in `.grad` of a plain module."""
        factor = 1.0 / self.divisor
        for chunk in self.chunks:
            if isinstance(chunk, DataParallelChunkInterface):
                chunk.scale_gradients(factor)
                continue
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _in_buffers(self) -> list[DataParallelChunkInterface]:
        return [chunk for chunk in self.chunks if isinstance(chunk, DataParallelChunkInterface)]
