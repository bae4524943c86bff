"""The sharding of tensors: boxes, the placement of a parameter over axes, and initial values.

boxes                              index ranges of a tensor, one a dimension; intersecting them reshards (no torch)
placement                          how a parameter is sharded and replicated (no torch)
stacked_matrices_for_init          the matrices that one parameter stacks (no torch)
initial_values                     the same initial weights in any layout
gather_and_split_whole_tensors     whole tensors of which the ranks of an axis hold parts
"""
