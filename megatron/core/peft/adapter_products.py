"""The products of adapters, A x and W x + scale B h, with few passes over tensors as wide as the model.

    down_products     A x of all parts [.., ranks] by one product, whose backward has one gradient of x
    add_up_products   scale B h [.., rows of the part], added to the linear's result where it lies

What both multiply are tensors of one width of the model and one of a few ranks, so their time is that of reading and writing the
wide one. Gradients of A and B accumulate in `main_grad`, now or when a schedule runs what it deferred, as a linear's do
(`linear_autograd.py`). Nothing is communicated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.ops.main_grad_interface import grad_was_added, grad_was_deferred, main_grad_and_beta, main_grad_of
from megatron.core.ops.recomputable_tensors import producer_of, request_from_producer, save_or_recompute
from megatron.core.ops.weight_grad_store import WeightGradStore
from megatron.core.peft.lora_config import WHOLE
from megatron.core.tensor_parallel.linear_autograd import accumulate_wgrad
from megatron.core.tensor_parallel.matmul_backend_interface import MatmulBackend


@dataclass(frozen=True)
class FusedRows:
    """How this rank's rows of a fused linear repeat: `groups` times the rows of each part. One part: no fused linear."""

    sizes: dict[str, int]  # part -> rows in a group, on this rank
    groups: int  # on this rank

    @property
    def of_group(self) -> int:
        """The rows of a group, of all parts."""
        return sum(self.sizes.values())

    def slice_of(self, part: str) -> slice:
        """Return the rows of a part in a group."""
        first = 0
        for name, size in self.sizes.items():
            if name == part:
                return slice(first, first + size)
            first += size
        raise KeyError(part)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return views of the rows of each part: y [.., out/t] -> [.., groups, size] each."""
        return y.unflatten(-1, (self.groups, self.of_group)).split(list(self.sizes.values()), dim=-1)


@dataclass(frozen=True)
class AdapterProducts:
    """The products of one linear's adapters.

    rows: of the linear. ranks: part -> its rank; the columns of h are those of one part behind another. matmul, store: of the
    linear.
    """

    rows: FusedRows
    ranks: dict[str, int]
    scale: float
    matmul: MatmulBackend
    store: WeightGradStore

    @cached_property
    def columns(self) -> list[slice]:
        """The columns of h of each part."""
        columns = []
        first = 0
        for rank in self.ranks.values():
            columns.append(slice(first, first + rank))
            first += rank
        return columns

    @cached_property
    def are_blocks(self) -> bool:
        """Whether the rows of each part are one block of the linear's; else they repeat by groups."""
        return self.rows.groups == 1 or WHOLE in self.ranks

    @cached_property
    def blocks(self) -> list[slice]:
        """The rows of each part, if they are one block."""
        everything = slice(None)
        return [everything if part == WHOLE else self.rows.slice_of(part) for part in self.ranks]

    def joined(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the B of all parts as one matrix for all rows of the linear, zero where a row has no part of h.

        matrices: [rows of the part, rank] each -> [out/t, sum of ranks]. For parts that repeat by groups: a product with it is
        faster than one for each group and part, since the rows of h are few.
        """
        groups = self.rows.groups
        whole = matrices[0].new_zeros(groups, self.rows.of_group, self.columns[-1].stop)
        for part, columns, matrix in zip(self.ranks, self.columns, matrices):
            whole[:, self.rows.slice_of(part), columns] = matrix.unflatten(0, (groups, -1))
        return whole.flatten(0, 1)

    def grads_of_parts(self, whole: Tensor) -> list[Tensor]:
        """Return the gradient of each part [groups, rows of the part in a group, rank] in that of `joined`."""
        whole = whole.unflatten(0, (self.rows.groups, -1))
        return [whole[:, self.rows.slice_of(part), columns] for part, columns in zip(self.ranks, self.columns)]


def down_products(x: Tensor, matrices: Sequence[Tensor], products: AdapterProducts) -> Tensor:
    """Return A x of all parts, one behind another: x [.., in], matrices [rank, in] of each part -> [.., sum of ranks]."""
    return _Down.apply(x, products, *matrices)


def add_up_products(y: Tensor, h: Tensor, matrices: Sequence[Tensor], products: AdapterProducts) -> Tensor:
    """Add scale B h to the rows of each part of y, in the memory of y, and return it.

    y: [.., out/t], of the linear; h: [.., sum of ranks]; matrices: [rows of the part on this rank, rank] of each part.
    """
    return _AddUp.apply(y, h, products, *matrices)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, products: AdapterProducts, *matrices: Tensor) -> Tensor:
        """x: [.., in]; matrices: [rank, in] each -> [.., sum of ranks]"""
        ctx.products = products
        ctx.parameters = matrices  # for their `main_grad`, which what is saved may lack
        # saved of x: what the backend makes of it, what it is recomputed from, or x itself, as in a linear's product
        matmul = products.matmul
        ctx.restore_x = ctx.producer = None
        saved_for_x: tuple[Tensor | None, ...] | None = ()
        if any(ctx.needs_input_grad[2:]):
            saved_for_x = matmul.save(x, None)
            if saved_for_x is not None:
                ctx.restore_x = lambda *saved: matmul.restore(saved, None)
            else:
                ctx.restore_x, saved_for_x = save_or_recompute(x)
                ctx.producer = producer_of(x)
        ctx.save_for_backward(*matrices, *saved_for_x)
        return matmul.forward(x, _stacked(matrices), None)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [.., sum of ranks] -> (gradient of x, None, of each matrix or None if it is in `main_grad` or deferred)

        Saved: the matrices, for the gradient of x, and what x is restored from, for theirs.
        """
        products = ctx.products
        count = len(ctx.parameters)
        saved = ctx.saved_tensors
        matrices, saved_for_x = saved[:count], saved[count:]
        needs_dgrad = ctx.needs_input_grad[0]
        trained = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        rows = grad.flatten(0, -2)  # [tokens, sum of ranks]

        def accumulate(x: Tensor) -> list[Tensor | None]:
            grads: list[Tensor | None] = [None] * count
            for i in trained:
                grads[i] = accumulate_wgrad(ctx.parameters[i], rows[:, products.columns[i]], x, products.matmul)
            return grads

        # A x may be computed anew by the producer of x, whose backward reads what that takes (see `LinearFunction`).
        defers = _defers(products.store, ctx.parameters, trained)
        has_main_grads = all(main_grad_of(ctx.parameters[i]) is not None for i in trained)
        producer_runs_wgrad = False
        if needs_dgrad and trained and has_main_grads and not defers:
            producer_runs_wgrad = request_from_producer(ctx.producer, accumulate)

        x = ctx.restore_x(*saved_for_x) if trained and not producer_runs_wgrad else None
        grad_x = products.matmul.dgrad(grad, _stacked(matrices), None) if needs_dgrad else None  # before the release
        grads: list[Tensor | None] = [None] * count
        if x is not None:
            grads = _now_or_later(accumulate, x.detach(), defers, ctx)
        return grad_x, None, *grads


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, h: Tensor, products: AdapterProducts, *matrices: Tensor) -> Tensor:
        """y: [.., out/t], changed; h: [.., sum of ranks]; matrices: [rows of the part, rank] each -> y"""
        ctx.products = products
        ctx.parameters = matrices
        ctx.shape = h.shape
        scaled = h * products.scale  # here, where the columns are few
        ctx.save_for_backward(*matrices, *([scaled] if any(ctx.needs_input_grad[3:]) else []))
        matmul = products.matmul
        y_rows = y.view(-1, y.shape[-1])  # [tokens, out/t]
        h_rows = scaled.flatten(0, -2)  # [tokens, sum of ranks]
        if products.are_blocks:
            for block, columns, matrix in zip(products.blocks, products.columns, matrices):
                matmul.add_forward(y_rows[:, block], h_rows[:, columns], matrix, None)
        else:
            matmul.add_forward(y_rows, h_rows, products.joined(matrices), None)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad: [.., out/t] -> (the same, for y; of h [.., sum of ranks]; None; of each matrix, or None as in `_Down`)

        Saved: the matrices, for the gradient of h, and scale h, for theirs.
        """
        products = ctx.products
        matmul = products.matmul
        count = len(ctx.parameters)
        saved = ctx.saved_tensors
        matrices, saved_h = saved[:count], saved[count:]
        trained = [i for i, needs in enumerate(ctx.needs_input_grad[3:]) if needs]
        rows = grad.flatten(0, -2)  # [tokens, out/t]

        grad_h = None
        if ctx.needs_input_grad[1]:
            if products.are_blocks:
                of_parts = [matmul.dgrad(rows[:, b], matrix, None) for b, matrix in zip(products.blocks, matrices)]
                grad_h = of_parts[0] if count == 1 else torch.cat(of_parts, dim=-1)
            else:
                grad_h = matmul.dgrad(rows, products.joined(matrices), None)
            grad_h = grad_h.mul_(products.scale).view(ctx.shape)

        def accumulate(scaled: Tensor) -> list[Tensor | None]:
            h_rows = scaled.flatten(0, -2)  # [tokens, sum of ranks]
            if not products.are_blocks:
                return _accumulate_by_groups(products, ctx.parameters, trained, rows, h_rows)
            grads: list[Tensor | None] = [None] * count
            for i in trained:
                block, columns = products.blocks[i], products.columns[i]
                grads[i] = accumulate_wgrad(ctx.parameters[i], rows[:, block], h_rows[:, columns], matmul)
            return grads

        grads: list[Tensor | None] = [None] * count
        if trained:
            defers = _defers(products.store, ctx.parameters, trained)
            grads = _now_or_later(accumulate, saved_h[0].detach(), defers, ctx)
        return grad, grad_h, None, *grads


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))


def _defers(store: WeightGradStore, parameters: Sequence[Tensor], trained: Sequence[int]) -> bool:
    """Return whether the gradients of these parameters wait: a schedule collects them, and they have a `main_grad`."""
    return store.is_collecting and all(main_grad_of(parameters[i]) is not None for i in trained)


def _now_or_later(
    accumulate: Callable[[Tensor], list[Tensor | None]], factor: Tensor, defers: bool, ctx: object
) -> list[Tensor | None]:
    """Run accumulate(factor) and return its gradients; or put it into the store, and return none."""
    if not defers:
        return accumulate(factor)
    ctx.products.store.put(torch.no_grad()(lambda: accumulate(factor)))
    for parameter, needs in zip(ctx.parameters, ctx.needs_input_grad[-len(ctx.parameters) :]):
        if needs:
            grad_was_deferred(parameter)
    return [None] * len(ctx.parameters)


def _accumulate_by_groups(
    products: AdapterProducts, parameters: Sequence[Tensor], trained: Sequence[int], grad: Tensor, h: Tensor
) -> list[Tensor | None]:
    """Add the gradient of each B whose rows repeat by groups to its `main_grad`; without one, return it.

    grad: [tokens, out/t], h: [tokens, sum of ranks]. One product, of which the parts lie in blocks.
    """
    wide = main_grad_of(parameters[trained[0]])
    if wide is None:
        whole = products.matmul.wgrad(grad, h, None)  # [out/t, sum of ranks]
    else:
        whole = wide.new_empty(grad.shape[1], h.shape[1])
        products.matmul.accumulate_wgrad(whole, grad, h, 0, None)  # not rounded to the dtype of the factors
    grads: list[Tensor | None] = [None] * len(parameters)
    of_parts = products.grads_of_parts(whole)
    for i in trained:
        main_grad, beta = main_grad_and_beta(parameters[i])
        if main_grad is None:
            grads[i] = of_parts[i].flatten(0, 1)
            continue
        total = main_grad.unflatten(0, (products.rows.groups, -1))
        if beta:
            total.add_(of_parts[i])
        else:
            total.copy_(of_parts[i])
        grad_was_added(parameters[i])
    return grads
