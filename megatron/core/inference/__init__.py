"""Text from a trained model. Names are imported when first asked for."""

from megatron.core.lazy import lazy_names

# The function `generate` is not here: the submodule of that name would shadow it as soon as anything imports it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".sampling": "SamplingConfig chooser distribution greedy keep_top_k keep_top_p sample",
        ".load": "layout_problems load_gpt",
        ".saved": "SavedSettings notes_on read_saved_settings",
    },
)
