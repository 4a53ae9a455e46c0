"""Text of the machine itself: sources and documentation of Python's library and of PyTorch.

Every machine that runs kvkeep has it. The rule of selection:

- files `*.py` of the standard library of the running Python, then of `torch`, which are UTF-8;
- without tests, packages that are installed inside the library, and tables of character sets;
- in the order of the SHA-256 of "ROOT/PATH", so that long and short files, and all kinds of
  modules, are spread evenly over the whole;
- each preceded by a line with its path, as many files as the tokens take.

So the same versions of Python and PyTorch give the same text anywhere. The list of the files with
their sizes and digests is part of a run's results; their content is not.
"""

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import write_atomic, write_json

LEFT_OUT = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}
)


@dataclass(frozen=True)
class TextFile:
    """path: with the name of its root, "python/argparse.py". tokens: with the line of its path."""

    path: str
    bytes: int
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Text:
    """The token ids of the files, cut at the number that was asked for."""

    files: tuple[TextFile, ...]
    ids: NDArray[np.uint32]


def default_roots() -> dict[str, Path]:
    """Return the folders of the sources by name."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    return {"python": Path(sysconfig.get_path("stdlib")), "torch": Path(torch.origin).parent}


def selected_files(roots: Mapping[str, Path]) -> list[tuple[str, Path]]:
    """Return names and paths of the files in the order of the text."""
    files = [
        (f"{name}/{path.relative_to(root).as_posix()}", path)
        for name, root in roots.items()
        for path in root.rglob("*.py")
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    ]
    return sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest())


def make_text(roots: Mapping[str, Path], encode: Callable[[str], list[int]], tokens: int) -> Text:
    """Encode files until there are `tokens` tokens. Raises InvalidArgument if there are too few."""
    files, parts, count = list[TextFile](), list[NDArray[np.uint32]](), 0
    for file, ids in _encoded_files(roots, encode):
        files.append(file)
        parts.append(ids)
        count += len(ids)
        if count >= tokens:
            return Text(tuple(files), np.concatenate(parts)[:tokens])
    raise InvalidArgument(
        f"expected {tokens:,} tokens of text in {', '.join(map(str, roots.values()))}; found "
        f"{count:,}: take fewer --tokens"
    )


def _encoded_files(
    roots: Mapping[str, Path], encode: Callable[[str], list[int]]
) -> Iterator[tuple[TextFile, NDArray[np.uint32]]]:
    for name, path in selected_files(roots):
        content = path.read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        ids = np.array(encode(f"# {name}\n{text}\n\n"), dtype=np.uint32)
        digest = hashlib.sha256(content).hexdigest()
        yield TextFile(name, len(content), digest, len(ids)), ids


def stored_text(folder: Path, name: str, make: Callable[[], Text]) -> Text:
    """Return the text in a folder, made and stored there if it is not there yet."""
    listing, numbers = folder / f"{name}.json", folder / f"{name}.ids"
    if not listing.exists():
        text = make()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(numbers, text.ids.tobytes())
        write_json(listing, {"files": [asdict(file) for file in text.files]})
    files = tuple(TextFile(**file) for file in json.loads(listing.read_bytes())["files"])
    return Text(files, np.fromfile(numbers, dtype=np.uint32))
