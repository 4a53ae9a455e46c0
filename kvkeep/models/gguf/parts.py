"""The files of one GGUF model: one, or the parts into which it was split.

llama.cpp's gguf-split names them NAME-00001-of-00003.gguf and so on. The first has the metadata.
"""

import re
from pathlib import Path

from kvkeep.errors import BadModelFile

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """The file itself, or, whichever of its parts it is, all parts of its model, in order.

    Raises BadModelFile where parts are not there.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    name, number, count = named[1], int(named[2]), int(named[3])
    if not 1 <= number <= count:
        raise BadModelFile(
            f"{path} calls itself part {number} of {count}: give its parts the names they had"
        )
    parts = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadModelFile(
            f"{path} is one of {count} parts of a model, of which these are not in its folder: "
            f"{', '.join(missing[:3])}{others}; fetch them, too"
        )
    return parts
