"""Tensor operations that know of no layer: matrix products, dropout, attention kernels, fused elementwise functions.

matmul, main_grad, deferred_wgrad, blas_bf16_accumulate    products, and where their weight gradients go
dropout, dropout_masks                                     masks by a counter, the same in any layout
fused_layer_ops, fused_formulas, activations, rotary_formulas    what lies between two products of a layer
rematerialize                                              tensors that the backward computes again
shard_sequence, tensor_hash, cross_entropy_kernels
attention/, compile/                                       attention kernels and masks; torch.compile
"""
