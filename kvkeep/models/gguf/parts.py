"""The files of a GGUF model: one, or several parts.

llama.cpp's gguf-split names parts NAME-00001-of-00003.gguf and so on; the first has the metadata.
"""

import re
from pathlib import Path

from kvkeep.errors import BadModelFile

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """Return the paths of a model's parts, in order. Raises BadModelFile if one is missing.

    The name of a part may be that of the file or, as in the hub's cache, of links to the files.
    """
    target = path.resolve()
    if _PART_NAME.fullmatch(target.name):
        path = target
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    name, part_number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= part_number <= count:
        raise BadModelFile(
            f"{path} says that it is part {part_number} of {count}: restore its file name"
        )
    parts = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadModelFile(
            f"{path} is one of {count} parts of a model, and these are missing from its folder: "
            f"{', '.join(missing[:3])}{more}; fetch them too"
        )
    return parts
