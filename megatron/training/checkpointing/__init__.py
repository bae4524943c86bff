"""Saving, loading and resuming a run.

save_and_load                      a run on disk: tensors as boxes, everything else as JSON
save_manager, hf_export      what a run writes, and when; folders of Hugging Face beside checkpoints
non_persistent_checkpoint                   copies for restarts, on the nodes' own disks
load_with_fallback                 the newest checkpoint without damage
compatibility, registry_compatibility, tokenizer_compatibility, unsaved_buffers    does a checkpoint fit this run?
train_state, hf_origin, model_name, save_folder    position of the run; where its model came from; the lock on --save
"""

from megatron.core.base.lazy_imports import names_of_megatron

__getattr__ = names_of_megatron(__name__)
