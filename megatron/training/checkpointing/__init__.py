"""Saving, loading and resuming a run.

save_and_load                      a run on disk: tensors as boxes, everything else as JSON
save_manager, hf_export      what a run writes, and when; Hugging Face folders
non_persistent_checkpoint                   copies for restarts, on the nodes' own disks or a shared one
load_with_fallback                 the newest undamaged checkpoint
compatibility, registry_compatibility, tokenizer_compatibility, unsaved_buffers    whether a checkpoint fits this run
train_state, hf_origin, model_name, save_folder    the position of the run; the folder from which its model was made; the
                                                    model's name; the lock on --save
"""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
