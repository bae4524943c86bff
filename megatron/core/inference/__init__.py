"""Text generation with a trained model.

    checkpoint_settings     the settings of the model in a checkpoint
    load_model              this rank's stage of that model, in any layout
    generate                generation token by token; `top_k_top_p_sampling` chooses each token
    score                   log-probabilities of given continuations, for evaluation
    generate_t5             generation with a T5: its encoder reads the prompts, its decoder writes

To add a sampling rule: a field of `SamplingConfig` and a line of `distribution`.
"""

from typing import TYPE_CHECKING

from megatron.core.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from megatron.core.inference.checkpoint_settings import (
        SavedSettings as SavedSettings,
        notes_on_checkpoint as notes_on_checkpoint,
        read_saved_settings as read_saved_settings,
    )
    from megatron.core.inference.load_model import (
        layout_problems as layout_problems,
        load_gpt as load_gpt,
        load_t5 as load_t5,
    )
    from megatron.core.inference.sampling_config import SamplingConfig as SamplingConfig
    from megatron.core.inference.top_k_top_p_sampling import (
        chooser as chooser,
        distribution as distribution,
        greedy as greedy,
        keep_top_k as keep_top_k,
        keep_top_p as keep_top_p,
        sample as sample,
    )

# The function `generate` is not here: the submodule of that name would shadow it as soon as anything imports it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".sampling_config": "SamplingConfig",
        ".top_k_top_p_sampling": "chooser distribution greedy keep_top_k keep_top_p sample",
        ".load_model": "layout_problems load_gpt load_t5",
        ".checkpoint_settings": "SavedSettings notes_on_checkpoint read_saved_settings",
    },
)
