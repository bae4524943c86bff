"""Import path of Megatron core: mixtures of experts (docs/experts.md).

What does Megatron's work with other arguments has a name of its own:

    Megatron core                                       here
    MoELayer                                            moe_layer.ParallelMoE
    TopKRouter                                          router.ParallelRouter
    routing_map, probs: [T, E]                          router.Routing: ids, weights [s, b, K] of the chosen alone
    topk_routing_with_score_function                    moe_utils.choose_experts, weights_of
    apply_router_token_dropping                         moe_utils.kept_tokens
    switch_load_balancing_loss_func                     moe_utils.balancing_loss
    get_updated_expert_bias                             moe_utils.updated_expert_bias
    MoEAlltoAllTokenDispatcher, MoEAllGather..          token_dispatcher.AllToAllDispatcher, AllGatherDispatcher
    dispatch and combine                                start and finish of a dispatcher
    permute, unpermute, sort_chunks_by_idxs             TokensToRows, RowsToTokens, transpose_chunks
    SequentialMLP, GroupedMLP, TEGroupedMLP             experts.ParallelExperts
    SharedExpertMLP                                     shared_experts.ParallelSharedExperts
    RouterReplay                                        in_memory_route_replay.RouteReplay
    MoEAuxLossAutoScaler                                ops.aux_loss_collector.AuxLosses; the class is there too, for scripts
"""
