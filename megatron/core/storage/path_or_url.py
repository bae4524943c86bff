"""Paths of files: those of this machine, and those of object stores, which are written as URLs.

    path_of("checkpoints/books") -> Path           path_of("s3://bucket/books") -> ObjectPath

`Path` would turn the two slashes of a URL into one, so a user's text becomes a path here and nowhere else.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

_URL = re.compile("([a-z][a-z0-9+.-]*)://")
_LOCAL_SCHEMES = ("file", "local")
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # scheme -> the extra of setup.py that installs its package


class Stat(NamedTuple):
    """The kind and size of a file or folder; links are followed."""

    is_folder: bool
    is_file: bool
    size: int  # bytes


class ObjectPath(PurePosixPath):
    """The URL of an object, or of a folder, which is a common prefix of names. `str` restores the second slash."""

    def __str__(self) -> str:
        return re.sub("^([^/:]+):/?", r"\1://", super().__str__())

    @property
    def scheme(self) -> str:
        """The part before `://`."""
        return self.parts[0].removesuffix(":")

    def absolute(self) -> "ObjectPath":
        """Return the path itself: every URL is absolute."""
        return self


def is_url(text: str | PurePosixPath) -> bool:
    """Return whether a folder, as a user gives it, is in an object store."""
    match = _URL.match(str(text))
    return match is not None and match[1] not in _LOCAL_SCHEMES


def same_folder(first: str, second: str) -> bool:
    """Return whether two folders, as a user gives them, are the same, by whatever path."""
    if is_url(first) or is_url(second):
        return is_url(first) and is_url(second) and ObjectPath(first) == ObjectPath(second)
    first_path = path_of(first)
    second_path = path_of(second)
    if os.path.exists(first_path) and os.path.exists(second_path):
        return os.path.samefile(first_path, second_path)
    return os.path.realpath(first_path) == os.path.realpath(second_path)


def is_direct_parent(root: str, folder: str) -> bool:
    """Return whether `folder` is directly in `root`, by whatever path; both as a user gives them."""
    if is_url(root) or is_url(folder):
        return is_url(root) and is_url(folder) and ObjectPath(root) == ObjectPath(folder).parent
    return same_folder(root, os.path.dirname(os.path.realpath(path_of(folder))))


def path_of(text: str | Path) -> Path:
    """Return the path of a folder as a user gives it; an ObjectPath has the methods of `Path` that make no system call.

    Raises ConfigError for a URL that this installation cannot read, and for empty text.
    """
    if isinstance(text, PurePosixPath):
        return text
    if not text:
        raise ConfigError("the name of the folder is empty; give a name, or . for the current folder")
    if not is_url(text):
        if _URL.match(text):  # file://
            text = _URL.sub("", text, count=1)
        return Path(text)
    problem = _url_problem(text)
    if problem:
        raise ConfigError(problem)
    return ObjectPath(text)


def _url_problem(url: str) -> str | None:
    """Return why a URL cannot be read and written here, in one line; None if it can."""
    scheme = _URL.match(url)[1]
    if "::" in url or not url[len(scheme) + 3 :].strip("/"):
        return f"{url} names no folder of an object store; give one as {scheme}://BUCKET/FOLDER"
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(scheme)
    except ValueError:
        return (
            f"{url}: {scheme} is not an object store that fsspec knows; give a folder, or for example "
            "s3://BUCKET/FOLDER"
        )
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        needs = f"pip install -c constraints.txt -e '.[{extra}]'" if extra else f"the package of this store ({error})"
        return f"{url} needs a package that is not installed: {needs}"
    return None
