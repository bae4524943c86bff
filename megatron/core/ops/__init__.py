"""Tensor operations that know of no layer: matrix products, dropout, attention kernels, fused elementwise functions.

cpu_half_precision_matmul, cblas_gemm_bf16bf16f32    matrix products in half precision on a CPU
main_grad_interface, deferred_wgrad    where weight gradients are accumulated
dropout, dropout_masks                                     masks by a counter, the same in any layout
fused_layer_ops, region_formula_helpers, activations, rotary_formulas    elementwise work between two products of a layer
rematerialize                                              tensors that a backward recomputes instead of saving them
shard_sequence, tensor_hash, cross_entropy_kernels
attention/, compile/                                       attention kernels and masks; torch.compile
"""
