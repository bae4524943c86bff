"""Tensor operations that know of no layer: matrix products, dropout, attention kernels, fused elementwise functions.

cpu_half_precision_matmul                       matrix products in half precision on a CPU
cblas_gemm_bf16bf16f32                          a product of bfloat16 matrices added to a float32 sum on a CPU
main_grad_interface                             the memory in which weight gradients are accumulated
weight_grad_store                               weight gradients that a schedule computes later
layout_invariant_dropout, dropout_masks         masks by a counter, the same in any layout
fused_layer_ops, activations                    elementwise work between two products of a layer
region_formula_helpers                          helpers of its formulas
apply_rotary_angles                             the rotation of queries and keys
recomputable_tensors                            tensors that a backward recomputes instead of saving them
shard_sequence                                  a rank's part of a sequence
count_flops_by_module                           FLOPs by layer
decisions_overridable_for_memory_prediction     decisions that the prediction of memory replaces
tensor_hash                                     hashes of a tensor's bits
cross_entropy_kernels                           the work of a cross entropy on the logits of each token
attention/, compile/                            attention kernels and masks; torch.compile
"""
