"""The version of this project: `megatron.__version__`, and what --version prints."""

NAME = "megatron-anywhere"
__version__ = "0.1.0"


def version_text() -> str:
    """Return what --version prints: the name of the distribution, and its version."""
    return f"{NAME} {__version__}"
