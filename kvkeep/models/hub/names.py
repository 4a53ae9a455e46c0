"""Short names that users give to GGUF files and model folders. Each is a symbolic link."""

import hashlib
import re
from pathlib import Path

from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.gguf.header import map_file, read_header
from kvkeep.models.gguf.parts import part_paths
from kvkeep.models.hub.library import LocalModel, home

TRANSFORMERS_PREFIX = "transformers:"  # prefix of a model that transformers computes
_VALID_NAME = re.compile(r"(?!.*\.gguf$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def split_prefix(name: str) -> tuple[str, str]:
    """Return the prefix "transformers:" of a model's name, or "", and the name without it."""
    prefix = TRANSFORMERS_PREFIX if name.startswith(TRANSFORMERS_PREFIX) else ""
    return prefix, name.removeprefix(prefix)


def name_path(name: str) -> Path:
    """Return the path of a name's symbolic link; that of the folder of links for ""."""
    return home() / "names" / name


def name_digest(name: str) -> str:
    """Return a digest of a model's name or absolute path, by which a server is recognised."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]


def named_models() -> dict[str, LocalModel]:
    """Return the named files and folders. One that is gone has 0 bytes."""
    folder = name_path("")
    links = sorted(filter(Path.is_symlink, folder.iterdir())) if folder.is_dir() else []
    return {
        link.name: LocalModel(
            name=link.name,
            path=link.readlink(),
            nbytes=_total_bytes(link.readlink()),
            source="added",
            slug="",
            last_used=link.lstat().st_mtime,
        )
        for link in links
    }


def add_name(name: str, path: Path) -> None:
    """Name a GGUF file or a model folder. Nothing is copied.

    Raises InvalidArgument for a name that is taken or not valid, BadModelFile, UnsupportedModel.
    """
    if not _VALID_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is not a valid model name: use letters, digits, '.', '_' and '-', begin "
            "with a letter or digit, and do not end in .gguf"
        )
    if path.is_dir():
        require_config(path)
    else:
        for part in part_paths(path):
            read_header(part, map_file(part))
    try:
        name_path("").mkdir(parents=True, exist_ok=True)
        name_path(name).symlink_to(path.absolute())
    except FileExistsError:
        if not name_path(name).is_symlink():
            raise InvalidArgument(
                f"{name_path(name)} is not a link to a model: remove it, or choose another name"
            ) from None
        raise InvalidArgument(
            f"{name} is {name_path(name).readlink()}; `kvkeep models rm {name}` frees the name"
        ) from None


def require_config(folder: Path) -> None:
    """Raise BadModelFile for a folder without config.json, which a model folder has."""
    if (folder / "config.json").exists():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    raise BadModelFile(
        f"{folder} has no config.json, so it is not a model folder; "
        + (f"pass the path of {files[0]} in it" if files else "pass a folder that has one")
    )


def _total_bytes(path: Path) -> int:
    """Return the bytes of a model; 0 if a file of it is missing."""
    try:
        files = path.iterdir() if path.is_dir() else part_paths(path)
        return sum(file.stat().st_size for file in files)
    except (OSError, BadModelFile):
        return 0
