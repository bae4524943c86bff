"""Recognize a pointer of Git LFS, which stands in a clone where the file itself was not fetched. Pure."""

_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"

# For error messages: what the file is, and what to do.
LFS_POINTER = "is a pointer of Git LFS and not the file itself"
FETCH_LFS = "run git lfs pull in the folder, or download the file"


def is_lfs_pointer(start: bytes) -> bool:
    """Return whether a file that starts with these bytes is a pointer."""
    return start.startswith(_FIRST_BYTES)
