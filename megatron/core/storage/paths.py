"""Paths of files: those of this machine, and those of object stores, which are written as URLs.

    path_of("checkpoints/books") -> Path           path_of("s3://bucket/books") -> ObjectPath

A URL does not survive `Path`, which makes one slash of two; so what a user gives becomes a path here and nowhere else.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron.core.base.dataclass_flags import ConfigError

_URL = re.compile("([a-z][a-z0-9+.-]*)://")
_OF_THIS_MACHINE = ("file", "local")
_EXTRAS = {"s3": "s3", "s3a": "s3"}  # scheme -> the extra of setup.py that installs its package


class Stat(NamedTuple):
    """What a path names; links are followed."""

    is_folder: bool
    is_file: bool
    size: int  # bytes


class ObjectPath(PurePosixPath):
    """The URL of an object, or of a folder, which is what many names begin with. Its text has both slashes again."""

    def __str__(self) -> str:
        return re.sub("^([^/:]+):/?", r"\1://", super().__str__())

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    def absolute(self) -> "ObjectPath":
        return self


def is_url(text: str | PurePosixPath) -> bool:
    """Whether a folder as a user gives it lies in an object store."""
    found = _URL.match(str(text))
    return found is not None and found[1] not in _OF_THIS_MACHINE


def same_folder(one: str, other: str) -> bool:
    """Whether two folders as a user gives them are the same, by any path."""
    if is_url(one) or is_url(other):
        return is_url(one) and is_url(other) and ObjectPath(one) == ObjectPath(other)
    one, other = path_of(one), path_of(other)
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def holds(root: str, folder: str) -> bool:
    """Whether `folder` lies directly in `root`, by any path; both as a user gives them."""
    if is_url(root) or is_url(folder):
        return is_url(root) and is_url(folder) and ObjectPath(root) == ObjectPath(folder).parent
    return same_folder(root, os.path.dirname(os.path.realpath(path_of(folder))))


def path_of(text: str | Path) -> Path:
    """The path of a folder as a user gives it, with the methods of `Path` that ask no system. Raises ConfigError for a
    URL that
    this installation cannot read, and for no text at all."""
    if isinstance(text, PurePosixPath):
        return text
    if not text:
        raise ConfigError("the name of a folder is empty; give one, or . for the current folder")
    if not is_url(text):
        return Path(_URL.sub("", text, count=1) if _URL.match(text) else text)
    if problem := _obstacle(text):
        raise ConfigError(problem)
    return ObjectPath(text)


def _obstacle(url: str) -> str | None:
    """Why a URL cannot be read and written here, in a line; None if it can."""
    scheme = _URL.match(url)[1]
    if "::" in url or not url[len(scheme) + 3 :].strip("/"):
        return f"{url} names no folder of an object store; give one as {scheme}://BUCKET/FOLDER"
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(scheme)
    except ValueError:
        return f"{url}: {scheme} is no object store that fsspec knows; give a folder, or for example s3://BUCKET/FOLDER"
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        needs = f"pip install -c constraints.txt -e '.[{extra}]'" if extra else f"the package of this store ({error})"
        return f"{url} needs a package that is not installed: {needs}"
    return None
