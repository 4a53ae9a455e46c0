"""The settings that `/set` changes: sampling, the length of answers, and the display."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kvkeep.cli.options import SamplingChoice
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Sampling

_NO = ("off", "no", "false", "0")
_YES = ("on", "yes", "true", "1")


@dataclass
class ChatSettings:
    """The settings of a chat.

    sampling: as given by options and `/set`. max_tokens: of an answer; None for no limit. seed: the
    one in use, at first that of a restored session. markdown, bar: whether to show answers as
    Markdown, and the memory at the foot of the screen.
    """

    sampling: SamplingChoice
    max_tokens: int | None
    seed: int | None = None
    markdown: bool = True
    bar: bool = True
    _resolved: "Sampling | None" = field(default=None, repr=False)

    @property
    def resolved(self) -> "Sampling":
        """The sampling parameters, with one seed for the whole chat."""
        if self._resolved is None:
            self._resolved = self.sampling.resolve(self.seed)
            self.seed = self._resolved.seed  # so that a random seed is drawn once
        return self._resolved

    def set(self, name: str, value: str) -> None:
        """Change a setting. Raises InvalidArgument, before any change, for a bad name or value."""
        read = _READ.get(name)
        if read is None:
            near = get_close_matches(name.lower(), _READ, 1)
            suggestion = f"did you mean {near[0]}? T" if near else "t"
            raise InvalidArgument(
                f"there is no setting {name!r}; {suggestion}here are: {', '.join(_READ)}"
            )
        try:
            parsed = read(value)
        except ValueError:
            raise InvalidArgument(f"{name} must be {_EXPECTED[read]}; found {value!r}") from None
        if name in ("markdown", "bar"):
            setattr(self, name, parsed)
        elif name == "max-tokens":
            self.max_tokens = None if parsed < 0 else parsed
        else:
            changed = dataclasses.replace(self.sampling, **{name.replace("-", "_"): parsed})
            self._resolved = changed.resolve(self.seed)  # raises for values out of range
            self.sampling = changed

    def lines(self) -> list[str]:
        """Return a line for each setting: its name and value."""
        return [f"  {name:<18}  {self._shown(name)}" for name in _READ]

    def _shown(self, name: str) -> str:
        if name in ("markdown", "bar"):
            return "on" if getattr(self, name) else "off"
        if name == "max-tokens":
            return "-1 (no end)" if self.max_tokens is None else str(self.max_tokens)
        value = getattr(self.sampling, name.replace("-", "_"))
        if name == "seed" and value is None:
            return f"{self.seed} (drawn)" if self.seed is not None else "random"
        return ", ".join(map(repr, value)) or "none" if name == "stop" else str(value)


def setting_names() -> list[str]:
    return list(_READ)


def _switch(text: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(text)
    return text.lower() in _YES


def _length(text: str) -> int:
    length = int(text)
    if length < -1:
        raise ValueError(text)
    return length


def _stop(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


_EXPECTED: dict[Callable[[str], Any], str] = {
    float: "a number",
    int: "a whole number",
    _length: "a whole number; -1 for no limit",
    _switch: "on or off",
}
_READ: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    "repetition-penalty": float,
    "repetition-window": int,
    "seed": int,
    "stop": _stop,
    "max-tokens": _length,
    "markdown": _switch,
    "bar": _switch,
}
