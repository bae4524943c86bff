"""Saving, loading and resuming a run.

save_and_load                           a run on disk: tensors as boxes, everything else as JSON
save_manager, hf_export                 what a run writes, and when; Hugging Face folders
non_persistent_checkpoint               copies for restarts, on the nodes' own disks or a shared one
load_with_fallback                      the newest undamaged checkpoint
check_same_model_and_optimizer,         whether a checkpoint fits this run
check_same_registered_functions
tokenizer_check_and_embedding_resize    whether its tokenizer does
initialize_from_weights                 initial values that follow from the weights that a run begins with
module_buffers                          the buffers of the model's modules
train_state                             the position of the run
hf_origin                               the folder from which its model was made
model_name                              the model's name
save_folder                             the lock on --save
"""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
