"""Whether a session goes on to the bit where it was restored, as it would have where it was."""

from collections.abc import Mapping
from dataclasses import dataclass

_OLDER = "what computed it is not noted there, as an earlier kvkeep saved it"
# What earlier ones noted of the kernels that they had, by what those are called now.
_RENAMED = {"compiled": "compiled avx512bf16"}


@dataclass(frozen=True)
class Exactness:
    """differs: what is computed with otherwise here, or was rounded there; empty where nothing is.

    What differs does not make a session wrong: its cells are the same, but for what was rounded,
    and the logits that follow agree as far as rounding does.
    """

    differs: tuple[str, ...] = ()

    @property
    def bit_exact(self) -> bool:
        """Whether the same tokens and logits follow, to the last bit."""
        return not self.differs

    @classmethod
    def of(cls, there: Mapping[str, str], here: Mapping[str, str], codec: str) -> "Exactness":
        """there, here: what a snapshot says it was computed with, and what is here; see
        `LoadedModel.arithmetic`. codec: of the file that it comes from.
        """
        differs = [f"cells: rounded by codec {codec}"] if codec == "int8" else []
        if not there:
            return cls((*differs, _OLDER))
        if there.get("kernels") in _RENAMED:
            there = {**there, "kernels": _RENAMED[there["kernels"]]}
        names = [name for name in here if there.get(name) != here[name]]
        if "weights" in names and "packed weights" in names:
            names.remove("packed weights")  # that goes without saying
        differs += [
            f"{name}: {_short(there, name)} there, {_short(here, name)} here" for name in names
        ]
        return cls(tuple(differs))


def _short(found: Mapping[str, str], name: str) -> str:
    return found.get(name, "")[:40] or "none"
