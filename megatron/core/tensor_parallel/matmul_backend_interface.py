"""MatmulBackend: how the matrix products of all linear layers and of the output layer are computed, in both directions.

    forward   Y  = X W^T        x     [.., in]        weight [out, in]  ->  [.., out]
    dgrad     dX = dY W         grad  [.., out]       weight [out, in]  ->  [.., in]
    wgrad     dW = dY^T X       grad  [tokens, out]   x [tokens, in]    ->  [out, in]

Factors are this rank's: [out/t, in] of a column-parallel weight, [out, in/t] of a row-parallel one. The layers communicate.
Ours, `linear_autograd.TorchMatmul`, is torch's product, native or widened. Another one is chosen when a model is built:
`LayerContext.with_matmul_backend`.

A backend keeps no values itself, since a model may have many weights. What it remembers of a weight (the largest value seen,
scales, quantised blocks) are persistent buffers of a module that `state_of` makes; they are saved, resumed and resharded
as every buffer is. They follow two rules:

- Products read what `end_of_step` of the module (`ChangesAtStepEnd`) has written, and change other buffers only so that
  neither repetition nor order matters, such as by a maximum: recomputation runs `forward` twice, tiles run it for parts of the
  tokens, and zero-bubble schedules run `wgrad` after the forwards of later microbatches.
- The buffers say how ranks agree on them. A maximum over all tokens and the whole weight, with which all layouts compute
  the same, is `BufferPlacement("max", Placement(shape, None, replicated_over=("tp",), partial_grad=("tp",)))`.
"""

import torch
from torch import Tensor, nn

from megatron.core.sharding.placement import Placement


class MatmulBackend:
    """The products of every linear layer. A subclass defines `forward`, `dgrad` and `wgrad`, and what else it needs.

    state: what `state_of` returned for the weight; None for a weight that no linear layer made, such as an adapter's factor.
    Gradients are as these methods return them: nothing is recorded for autograd. On the meta device, where a
    run is predicted, factors have shapes and no values.
    """

    def state_of(self, placement: Placement, dtype: torch.dtype, device: torch.device | str) -> nn.Module | None:
        """Return a module whose buffers are the state of one weight; None: there is none.

        placement, dtype, device: of the weight; its whole shape is `placement.shape`. Called on every rank, once for each
        linear layer that is built. The layer holds the module as `matmul_state`, which is its name in checkpoints.
        """
        return None

    def state_of_part(
        self, placement: Placement, local_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> nn.Module | None:
        """Return the same for a state with a value for each row or column; by default that of `state_of`.

        local_shape: of this rank's part, [out/t, in] or [out, in/t]. It has the padding of the output layer's vocabulary, and
        is not an equal share where `placement.rows` lists a rank's rows.
        """
        return self.state_of(placement, dtype, device)

    def forward(self, x: Tensor, weight: Tensor, state: nn.Module | None) -> Tensor:
        """Return X W^T. x: [.., in], weight: [out, in] -> [.., out] in the dtype of x, in memory of its own."""
        raise NotImplementedError

    def add_forward(self, total: Tensor, x: Tensor, weight: Tensor, state: nn.Module | None) -> None:
        """Add X W^T to total, in place. x: [tokens, in], weight: [out, in], total: [tokens, out], perhaps columns of a wider
        matrix. A backend whose product can add to `total` does it here.
        """
        total.add_(self.forward(x, weight, state))

    def write_forward(self, out: Tensor, x: Tensor, weight: Tensor, state: nn.Module | None) -> None:
        """Write X W^T to out. x: [tokens, in], weight: [out, in], out: [tokens, out], rows of a larger matrix."""
        out.copy_(self.forward(x, weight, state))

    def rows_of_product(self, rows: int, x: Tensor) -> int:
        """Return how many rows a product of `rows` rows of x should have, at least `rows`, where others lie behind them.

        Numbers of rows change in every step where a router decides them. Kernels that are compiled for each shape need few
        shapes.
        """
        return rows

    def dgrad(self, grad: Tensor, weight: Tensor, state: nn.Module | None) -> Tensor:
        """Return dY W. grad: [.., out], weight: [out, in] -> [.., in] in the dtype of grad, in memory of its own."""
        raise NotImplementedError

    def write_dgrad(self, out: Tensor, grad: Tensor, weight: Tensor, state: nn.Module | None) -> None:
        """Write dY W to out. grad: [tokens, out], weight: [out, in], out: [tokens, in]; see `write_forward`."""
        out.copy_(self.dgrad(grad, weight, state))

    def wgrad(self, grad: Tensor, x: Tensor, state: nn.Module | None) -> Tensor:
        """Return dY^T X. grad: [tokens, out], x: [tokens, in] -> [out, in]"""
        raise NotImplementedError

    def accumulate_wgrad(self, total: Tensor, grad: Tensor, x: Tensor, beta: int, state: nn.Module | None) -> None:
        """Set total to beta total + dY^T X. Shapes as in `wgrad`; total: [out, in], often of a wider dtype.

        beta: 1, or 0 where total has no values yet. A backend whose product can add to `total` does it here.
        """
        product = self.wgrad(grad, x, state)
        if beta:
            total.add_(product)
        else:
            total.copy_(product)

    def save(self, x: Tensor, state: nn.Module | None) -> tuple[Tensor, ...] | None:
        """Return what to save of a layer's input for `wgrad`, such as the quantised input; None: the input itself.

        x: [.., in]; under sequence parallelism a column-parallel layer's [s/t, b, in]. What is saved does not come from the
        producer of x, so `--compile regions` keeps x for it no longer. Not called for a frozen weight, which has no `wgrad`.
        """
        return None

    def restore(self, saved: tuple[Tensor, ...], state: nn.Module | None) -> Tensor:
        """Return the x of `wgrad`, shaped and typed as the x that was saved: `save` inverted."""
        raise NotImplementedError(f"{type(self).__name__} defines save, and must define restore")
