"""The name and the version of `megatron.core`, under Megatron's names.

`megatron/__init__.py` checks that they are ours.
"""

# The release of megatron-core whose interface this one follows: scripts compare it to choose between Megatron's
# signatures.
MAJOR = 0
MINOR = 16
PATCH = 1
PRE_RELEASE = "+anywhere"

VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)

__shortversion__ = ".".join(map(str, VERSION[:3]))
__version__ = __shortversion__ + PRE_RELEASE

__package_name__ = "megatron-anywhere"
__contact_names__ = "the contributors of megatron-anywhere"
__contact_emails__ = ""
__homepage__ = ""
__repository_url__ = ""
__download_url__ = ""
__description__ = "Megatron-style pretraining of transformers, on a CPU too"
__license__ = "Apache-2.0"
__keywords__ = "deep learning, language model, pretraining, transformer, Megatron, PyTorch"
