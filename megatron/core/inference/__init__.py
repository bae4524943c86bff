"""Text from a trained model.

    saved.py      what a checkpoint says of the model in it
    load.py       this rank's stage of that model, in any layout
    generate.py   texts continued token by token; sampling.py chooses each token

Training and the layers below know nothing of it; `tools/generate.py` is its command line. A new rule of choice is a field of
`SamplingConfig` and a line of `distribution`. Names are imported when first asked for.
"""

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
