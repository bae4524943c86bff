"""Saving, loading and resuming a run.

save_and_load_run_state                  a run on disk: tensors as boxes, everything else as JSON
save_manager, hf_export                  what a run writes, and when; Hugging Face folders
non_persistent_checkpoint                copies for restarts, on the nodes' own disks or a shared one
load_with_fallback                       the newest undamaged checkpoint
check_same_model_and_optimizer,          whether a checkpoint fits this run
compare_registry_functions_on_resume
tokenizer_check_and_embedding_resize     whether its tokenizer does
init_adapters_from_base_weights          initial values that follow from the weights that a run begins with
module_buffers                           the buffers of the model's modules
train_state_counters                     the position of the run
hf_origin                                the folder from which its model was made
model_class_and_custom_modules           the model's name
check_and_lock_save_folder               the lock on --save
"""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
