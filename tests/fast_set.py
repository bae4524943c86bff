"""What the fast set leaves to the full one, beside the tests that are marked `full`; and what both leave to `pytest -m sweep`."""

from collections import Counter

import pytest

# Of these tests' cases the fast set has one in so many, the first among them.
ONE_IN = {
    "unit/tools/test_configure.py::test_impossible_answers_are_refused": 5,
    "unit/project/test_contracts.py::test_a_name_has_the_contract_of_its_namesake": 4,
    "unit/datasets/test_read_megatron_index_cache.py::test_the_order_of_a_blend_is_taken_if_it_is_that_of_the_weights": 4,
    "unit/pipeline_parallel/test_lower.py::test_beginning_and_waiting_in_order_delays_no_compute": 5,
    "unit/pipeline_parallel/test_lower.py::test_no_schedule_deadlocks_whatever_the_cost": 5,
    "unit/training/test_memory.py::test_a_run_without_room_says_what_takes_most_and_what_makes_it_less": 4,
    "unit/training/test_memory.py::test_state_follows_the_published_bytes_a_parameter": 3,
    "unit/project/test_names.py::test_a_name_is_where_forks_import_it_from": 4,
    "unit/project/test_refusals.py::test_what_cannot_work_is_refused_in_words": 3,
    "unit/tools/test_yaml_recipes.py::test_memory_is_predicted_of_every_recipe": 24,
    "unit/tools/test_yaml_recipes.py::test_the_data_of_every_recipe_are_planned_or_refused_in_a_line": 5,
    "unit/tools/test_yaml_recipes.py::test_the_walkthrough_shows_the_model_of_every_recipe": 5,
    "unit/tools/test_sentences.py::test_long_runs_take_linear_time": 5,
    "ranks/models/test_bert.py::test_every_layout_equals_one_process": 2,
    "ranks/inference/test_cache.py::test_cached_scores_equal_the_plain_forward": 5,
    "ranks/context_parallel/test_context_parallel.py::test_a_shared_sequence_gives_the_numbers_of_one_process": 15,
    "ranks/deepspeed/test_deepspeed.py::test_two_ranks_have_the_weights_of_one_process": 4,
    "ranks/convert/test_families.py::test_scores_are_those_of_transformers": 4,
    "ranks/inference/test_generate.py::test_weights_of_any_layout_make_the_same_model": 4,
    "ranks/training/test_going_back.py::test_only_a_resumed_run_goes_back_by_itself": 3,
    "ranks/convert/test_interchange.py::test_a_folder_is_written_as_it_was_to_the_bit": 10,
    "ranks/tensor_parallel/test_layers.py::test_column_parallel_equals_linear": 3,
    "ranks/tensor_parallel/test_layers.py::test_row_parallel_equals_linear": 3,
    "ranks/pipeline_parallel/test_megatron_loop.py::test_megatrons_loop_gives_one_processs_weights": 2,
    "ranks/optimizer/test_precision.py::test_half_precision_layouts_agree_as_well_as_half_precision_can": 3,
    "ranks/sharding/test_random.py::test_every_layout_starts_from_the_same_weights": 4,
    "ranks/models/test_lora.py::test_every_layout_trains_adapters_as_one_process": 4,
    "ranks/models/test_matmul_backend.py::test_every_layout_trains_with_8_bits_as_one_process": 4,
    "ranks/models/test_toy_moe.py::test_every_layout_trains_as_one_process": 7,
    "ranks/ops/test_aux_losses.py::test_every_layout_trains_as_one_process": 4,
    "ranks/models/test_recipes.py::test_a_recipe_parses_and_has_the_published_parameters": 5,
    "ranks/dist_checkpointing/test_save_matrix.py::test_what_is_saved_is_resumed_to_the_bit_and_resharded": 6,
    "ranks/distributed/test_frozen_weights.py::test_a_unit_is_gathered_around_its_uses_and_is_alone": 3,
    "ranks/distributed/test_frozen_weights.py::test_gradients_are_those_of_one_process": 5,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_a_step_sends_what_the_formula_says": 7,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_shards_equal_one_process": 36,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_shards_load_into_any_layout": 3,
}

# Of these tests' cases the test command has one in so many: each walks a product, of which the rest takes minutes.
COMMAND_ONE_IN = {
    "ranks/context_parallel/test_context_parallel.py::test_a_shared_sequence_gives_the_numbers_of_one_process": 8,
    "ranks/context_parallel/test_context_precision.py::test_compiled_regions_give_one_eager_process_in_float64": 12,
    "ranks/convert/test_export_checkpoint_to_hf.py::test_parts_of_any_size_make_the_same_folder": 2,
    "ranks/convert/test_families.py::test_every_option_of_a_family_is_seen": 2,
    "ranks/convert/test_hf_config.py::test_a_published_description_makes_the_published_model": 12,
    "ranks/convert/test_hf_training.py::test_five_steps_at_tp_2_and_pp_2_follow_transformers": 2,
    "ranks/convert/test_interchange.py::test_a_bfloat16_folder_keeps_its_bits": 6,
    "ranks/convert/test_save_hf.py::test_ranks_write_the_bytes_of_one_process": 2,
    "ranks/dist_checkpointing/test_save_matrix.py::test_what_is_saved_is_resumed_to_the_bit_and_resharded": 3,
    "ranks/distributed/test_bitwise.py::test_a_layout_in_fixed_order_has_the_bits_of_one_process": 6,
    "ranks/distributed/test_bitwise.py::test_a_schedule_has_the_bits_of_1f1b_by_itself": 2,
    "ranks/distributed/test_zero_matrix.py::test_every_triple_of_choices_equals_one_process": 24,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_an_error_in_a_step_leaves_nothing_to_the_next": 3,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_gradients_may_be_kept_in_bfloat16": 2,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_shards_equal_one_process": 12,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_shards_load_into_any_layout": 2,
    "ranks/distributed/test_zero_reduce_and_gather.py::test_steps_may_have_other_numbers_of_microbatches": 4,
    "ranks/distributed/test_zero_units.py::test_a_unit_is_there_only_while_it_computes": 2,
    "ranks/inference/test_cache.py::test_cached_scores_equal_the_plain_forward": 4,
    "ranks/inference/test_cache.py::test_prompts_shared_among_ranks_give_the_scores_of_the_plain_forward": 2,
    "ranks/inference/test_hf_generation.py::test_greedy_ids_are_those_of_transformers": 4,
    "ranks/models/test_base_product.py::test_every_layout_equals_one_process": 13,  # whose models come four by four
    "ranks/models/test_bert.py::test_a_shared_text_gives_the_numbers_of_one_process": 2,
    "ranks/models/test_bert.py::test_every_layout_equals_one_process": 6,
    "ranks/models/test_option_parity.py::test_options_give_the_numbers_of_one_process": 2,
    "ranks/models/test_parity.py::test_every_pair_of_choices_equals_one_process": 3,
    "ranks/models/test_parity.py::test_every_triple_of_choices_equals_one_process": 36,
    "ranks/models/test_pretrain_bert.py::test_every_layout_trains_as_one_process": 9,
    "ranks/models/test_pretrain_t5.py::test_every_layout_trains_as_one_process": 4,
    "ranks/models/test_recipes.py::test_its_tiny_form_trains_at_tp_2_and_pp_2": 9,
    "ranks/models/test_t5.py::test_every_layout_and_feature_equals_one_process": 6,
    "ranks/models/test_toy_moe.py::test_every_layout_trains_as_one_process": 2,
    "ranks/offload/test_activations_elsewhere.py::test_numbers_and_calls_are_those_without": 2,
    "ranks/offload/test_offload.py::test_offload_equals_one_process": 4,
    "ranks/ops/test_aux_losses.py::test_every_layout_trains_as_one_process": 2,
    "ranks/ops/test_compiled.py::test_a_region_is_its_eager_form": 3,
    "ranks/ops/test_compiled.py::test_layouts_with_regions_equal_one_eager_process": 4,
    "ranks/ops/test_compiled_runs.py::test_a_run_with_regions_is_the_eager_run": 2,
    "ranks/ops/test_recomputable_tensors.py::test_a_gradient_in_a_buffer_is_made_in_the_backward_of_its_inputs_maker": 2,
    "ranks/ops/test_recomputable_tensors.py::test_gradients_are_those_of_inputs_that_are_kept": 2,
    "ranks/ops/test_recomputable_tensors.py::test_the_compiled_program_makes_the_same_bits": 2,
    "ranks/optimizer/test_muon_matrix_update.py::test_a_layout_gives_the_numbers_of_one_process": 3,
    "ranks/optimizer/test_optimizer.py::test_a_bad_gradient_stops_every_rank_before_anything_is_updated": 2,
    "ranks/optimizer/test_own_optimizer.py::test_an_update_of_whole_matrices_is_that_of_one_process_and_goes_on_from_its_checkpoint": 2,
    "ranks/project/test_flags_change_something.py::test_a_flag_has_an_effect_or_is_named": 50,
    "ranks/project/test_flags_change_something.py::test_a_flag_has_an_effect_where_it_is_of_use": 14,
    "ranks/optimizer/test_precision.py::test_a_scaled_loss_changes_no_number": 3,
    "ranks/optimizer/test_precision.py::test_half_precision_layouts_agree_as_well_as_half_precision_can": 3,
    "ranks/optimizer/test_precision.py::test_overflow_on_one_rank_skips_the_step_on_all": 3,
    "ranks/optimizer/test_precision.py::test_sgd_and_decoupled_rates_equal_one_process": 3,
    "ranks/optimizer/test_precision.py::test_what_is_not_frozen_trains_as_in_one_process": 5,
    "ranks/optimizer/test_split_master.py::test_a_checkpoint_holds_whole_masters": 3,
    "ranks/optimizer/test_split_master.py::test_a_run_has_the_bits_of_whole_masters": 3,
    "ranks/pipeline_parallel/test_forward_backward_func.py::test_a_loop_may_finalize_gradients_as_often_as_it_likes": 3,
    "ranks/pipeline_parallel/test_forward_backward_func.py::test_a_scaled_loss_leaves_scaled_gradients": 2,
    "ranks/pipeline_parallel/test_forward_backward_func.py::test_it_gives_the_losses_and_gradients_of_the_train_step": 2,
    "ranks/pipeline_parallel/test_megatron_loop.py::test_megatrons_loop_gives_one_processs_weights": 3,
    "ranks/pipeline_parallel/test_v_schedule.py::test_a_checkpoint_of_one_map_goes_on_in_the_other": 2,
    "ranks/pipeline_parallel/test_v_schedule.py::test_a_run_logs_and_validates_once_where_the_last_stage_is": 2,
    "ranks/pipeline_parallel/test_v_schedule.py::test_gradients_are_summed_in_every_zero_stage": 2,
    "ranks/pipeline_parallel/test_zero_bubble.py::test_a_checkpoint_goes_on_under_another_schedule": 2,
    "ranks/pipeline_parallel/test_zero_bubble.py::test_numbers_are_those_of_one_process": 3,
    "ranks/training/test_memory_measured.py::test_recorded_peaks_are_the_predicted": 12,
    "ranks/training/test_memory_measured.py::test_the_record_is_what_ranks_take_today": 2,
    "ranks/training/test_schedules.py::test_a_ramp_is_the_same_in_any_layout": 3,
    "ranks/training/test_schedules.py::test_a_ramp_over_data_parallel_ranks_goes_on_with_fewer": 2,
    "ranks/training/test_watch.py::test_norms_zeros_and_statistics_are_those_of_one_process": 2,
    "ranks/transformer/test_model_corners.py::test_layout_equals_one_process": 3,
    "ranks/transformer/test_model_options.py::test_scores_and_gradients_are_those_of_the_formulas": 2,
    "unit/pipeline_parallel/test_lower.py::test_no_schedule_deadlocks_over_the_whole_product": 4,
    "unit/project/test_checkout.py::test_a_tool_finds_the_scripts_of_models": 2,
    "unit/storage/test_s3.py::test_a_run_whose_store_ends_goes_on_to_the_same_bits": 2,
    "unit/tools/test_yaml_recipes.py::test_every_recipe_trains_by_its_script_in_the_size_of_the_readme": 6,
    "unit/tools/test_yaml_recipes.py::test_memory_is_predicted_of_every_recipe": 24,
    "unit/tools/test_reader_ends.py::test_a_reader_that_ends_first_ends_a_tool_without_a_word": 2,
    "unit/training/test_memory.py::test_activations_of_a_layer_are_the_published_ones": 2,
}


def leave_cases(items: list[pytest.Item]) -> None:
    """Marks those that the fast set leaves `full`, those that the command leaves `sweep` too; a test's cases are counted in their order."""
    for table, marker in ((ONE_IN, pytest.mark.full), (COMMAND_ONE_IN, pytest.mark.sweep)):
        seen = Counter()
        for item in items:
            if marker is pytest.mark.full and item.get_closest_marker("full"):
                continue
            name = item.nodeid.partition("[")[0].removeprefix("tests/")
            if seen[name] % table.get(name, 1):
                item.add_marker(marker)
            seen[name] += 1
