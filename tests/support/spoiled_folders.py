"""Manifests changed in one place, and folders of checkpoints as somebody who means harm could leave them; drawn by a generator."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, POINTER, NEWEST = "manifest.json", "latest_checkpointed_iteration.txt", "iter_0000006"

ODD: list[Any] = [
    *(0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308, True, False, None),
    *(
        "",
        "..",
        "../../outside",
        "/etc/passwd",
        "rank_00000.bin/..",
        "a\0b",
        "\ud800",
        "x" * 300,
        "0" * 64,
        "float64",
        "object",
    ),
    *([], {}, [[]], [[0, 1]], [[0, 2**62], [0, 2**62]], {"box": []}, [None], {"": {"": {}}}, [0] * 1000, [[0, 1]] * 70),
]


# ---------------------------------------------------------------- a manifest


def sealed(raw: Any) -> bytes:
    """The text of a manifest whose own hash is right, so that what lies behind it is reached."""
    body = json.dumps(raw)[:-1].encode() if isinstance(raw, dict) and raw else b"{"
    return body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """(object or list, key) of everything in a JSON value."""
    found, left = [], [value]
    while left:
        at = left.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at))
        found += [(at, key) for key in keys]
        left += [at[key] for key in keys if isinstance(at[key], dict | list)]
    return found


def mutated(text: bytes, draw: random.Random) -> tuple[str, bytes]:
    """(what was done, the manifest): a value, a key or bytes changed; seven of ten have a right hash again."""
    if draw.random() < 0.3:
        return "bytes", _damaged(text, draw)
    raw = json.loads(text)
    del raw["sha256"]
    part = draw.choice(("", "", "state", "state", "tensors", "tensors", "tensors", "files"))
    at, key = draw.choice(places_in(raw[part] if part else raw))
    kind = draw.choice(("odd", "odd", "odd", "shifted", "gone", "twice", "renamed"))
    if kind == "shifted" and isinstance(at[key], int) and not isinstance(at[key], bool):
        at[key] += draw.choice((-64, -1, 1, 64, 2**32))
    elif kind == "gone":
        del at[key]
    elif kind == "twice" and isinstance(at, list):
        at.append(at[key])
    elif kind == "renamed" and isinstance(at, dict):
        at[f"{key}{draw.choice(('', 'x', '/..', chr(0)))}"] = at.pop(key)
    else:
        at[key] = draw.choice(ODD)
    return f"{kind} {part}", sealed(raw)


def _damaged(content: bytes, draw: random.Random) -> bytes:
    """A bit, a byte, an end cut off or added, bytes taken out, put in or moved."""
    changed, at = bytearray(content), draw.randrange(len(content))
    kind, some = draw.randrange(6), bytes(draw.randrange(256) for _ in range(draw.randint(1, 9)))
    if kind == 0:
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        changed[at] = (changed[at] + draw.randrange(1, 256)) % 256
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        changed += some
    elif kind == 4:
        del changed[at : at + draw.randint(1, 9)]
    else:
        changed[at:at] = some
    return bytes(changed)


# ---------------------------------------------------------------- a folder


def hostile(root: Path, outside: Path, draw: random.Random) -> list[str]:
    """Does one to three things to `root`, a folder of the iterations 2, 4 and 6; `outside` lies beside it. What was done."""
    done = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice(list(KINDS))
        try:
            KINDS[name](root, outside, draw)
        except (OSError, ValueError):  # something before has taken the file away, or spoiled it
            continue
        done.append(name)
    return done


def _text_of(path: Path) -> str:
    """Of a manifest that is a file still, of its size."""
    if not path.is_file() or path.stat().st_size > 1 << 24:
        raise FileNotFoundError(path)
    return path.read_bytes().decode()


def _replace(path: Path) -> Path:
    """Removes what is there; the free path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _something(path: Path, outside: Path, draw: random.Random) -> None:
    """In the place of a file or folder: a link, a pipe, a loop, a device, an empty file or folder, one without an end."""
    kind = draw.randrange(10)
    _replace(path)
    links = ["/etc/passwd", "/dev/zero", "/dev/full", str(path), "nowhere", str(outside), str(outside / NEWEST), ".."]
    if kind < 5:
        path.symlink_to(draw.choice(links))
    elif kind == 5:
        os.mkfifo(path)
    elif kind == 6:
        path.mkdir()
    elif kind == 7:
        path.write_bytes(b"")
    elif kind == 8:
        with path.open("wb") as file:
            file.truncate(1 << 42)
    else:
        path.write_bytes(draw.randbytes(100))


def _pointer(root: Path, outside: Path, draw: random.Random) -> None:
    texts = [
        "../../outside",
        "-1",
        "9" * 30,
        "9" * 18,
        "1e3",
        "4\0",
        "release",
        " 6 ",
        "0x6",
        "\u0666",
        "6\n4",
        "",
        "4",
        "6" * 10**5,
    ]
    if draw.random() < 0.6:
        _replace(root / POINTER).write_text(draw.choice(texts))
    else:
        _something(root / POINTER, outside, draw)


def _iteration(root: Path, outside: Path, draw: random.Random) -> None:
    names = [
        "iter_0000008",
        "iter_0000008.partial",
        "iter_0000008.replaced",
        "iter_0000006.replaced",
        "iter_0000006.damaged",
    ]
    names += ["iter_9999999999999999999", "iter_00000060", "iter_-000001", "iter_0000006 ", "iter_0000008.1.partial"]
    _something(root / draw.choice([NEWEST, "iter_0000004", *names]), outside, draw)


def _renamed(root: Path, outside: Path, draw: random.Random) -> None:
    (root / NEWEST).rename(
        root / draw.choice(("iter_0000008", "iter_0000008.partial", "iter_0000006.replaced", "iter_6"))
    )


def _linked(root: Path, outside: Path, draw: random.Random) -> None:
    """A name that a save or a start clears away, as a link to somewhere else."""
    name = draw.choice(
        ("iter_0000009.partial", "iter_0000006.replaced", "iter_0000009.2.partial", "iter_0000009.replaced")
    )
    (root / name).symlink_to(draw.choice((outside, outside / NEWEST, outside / "iter_0000002")))


def _manifest(root: Path, outside: Path, draw: random.Random) -> None:
    path = root / NEWEST / MANIFEST
    if draw.random() < 0.3:
        _something(path, outside, draw)
    else:
        path.write_bytes(mutated(_text_of(path).encode(), draw)[1])


def _file(root: Path, outside: Path, draw: random.Random) -> None:
    _something(root / NEWEST / draw.choice(("rank_00000.bin", "rank_00001.bin", "rank_00002.bin", "x")), outside, draw)


def _boxes(root: Path, outside: Path, draw: random.Random) -> None:
    """Boxes that overlap, reach outside, are upside down, or hold more than there is."""
    path = root / NEWEST / MANIFEST
    raw = json.loads(_text_of(path))
    del raw["sha256"]
    record = draw.choice([record for record in raw["tensors"].values() if record["pieces"] and record["shape"]])
    piece = draw.choice(record["pieces"])
    span = draw.choice(piece["box"])
    span[draw.randrange(2)] = draw.choice((0, 1, 2**31, 2**62, -1, span[0], span[1] + 1))
    if draw.random() < 0.5:
        record["pieces"].append(dict(piece))
    path.write_bytes(sealed(raw))


def _escape(root: Path, outside: Path, draw: random.Random) -> None:
    """File names that leave the folder."""
    path = root / NEWEST / MANIFEST
    names = [
        "../iter_0000004/rank_00000.bin",
        "../../outside/iter_0000006/rank_00000.bin",
        "/etc/passwd",
        "..",
        ".",
        "a/b",
        "rank_00000.bin\0",
    ]
    name = draw.choice([*names, str(outside / NEWEST / "rank_00000.bin")])
    path.write_bytes(sealed_text(_text_of(path).replace("rank_00000.bin", name.replace("\0", "\\u0000"))))


def sealed_text(text: str) -> bytes:
    raw = json.loads(text)
    raw.pop("sha256")
    return sealed(raw)


def _lost(root: Path, outside: Path, draw: random.Random) -> None:
    _replace(root / draw.choice((POINTER, NEWEST, f"{NEWEST}/{MANIFEST}", f"{NEWEST}/rank_00001.bin", "iter_0000004")))


KINDS: dict[str, Callable[[Path, Path, random.Random], None]] = {
    f.__name__.strip("_"): f
    for f in (_pointer, _iteration, _renamed, _linked, _manifest, _file, _boxes, _escape, _lost)
}


def tree_of(root: Path) -> dict[str, tuple]:
    """Every path below a folder, and what it is; links are not followed. Equal before and after, nothing has changed."""
    found = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name)
            stat = path.lstat()
            found[str(path)] = (stat.st_mode, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found
