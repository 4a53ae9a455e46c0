"""The settings that `/set` changes: sampling, length of answers, and display."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kvkeep.cli.options import SamplingOptions
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Sampling

SWITCHES = {"markdown": "renders_markdown", "bar": "shows_status_line"}  # on/off settings: fields
SERVER_LIMITS = {  # the largest values that a server accepts
    **dict.fromkeys(("temperature", "repetition_penalty"), 100),
    **dict.fromkeys(("top_k", "repetition_window"), 10_000_000),
    "seed": 2**64 - 1,
    "max_tokens": 1_000_000,
}
_OFF = ("off", "no", "false", "0")
_ON = ("on", "yes", "true", "1")


@dataclass
class ChatSettings:
    """The settings of a chat. Raises InvalidArgument for one beyond its limit."""

    sampling: SamplingOptions
    max_tokens: int | None  # of an answer; None for no limit
    seed: int | None = None  # the one in use, at first that of a restored session
    defaults: "Sampling | None" = None  # of the model; None for a model on a server
    renders_markdown: bool = True  # or else answers are shown as they are
    speculate: bool | None = None  # on a server; None for its default
    shows_status_line: bool = True  # below the prompt: the state of the memory
    limits: Mapping[str, int] = field(default_factory=dict)  # the largest values, if there are any
    _resolved_sampling: "Sampling | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_limits(self.sampling, self.max_tokens)

    @property
    def resolved_sampling(self) -> "Sampling":
        """The sampling parameters, with one seed for the whole chat."""
        if self._resolved_sampling is None:
            self._resolved_sampling = self.sampling.resolve(self.defaults, self.seed)
            self.seed = self._resolved_sampling.seed  # a random seed is drawn once
        return self._resolved_sampling

    def set(self, name: str, value: str) -> None:
        """Change a setting. Raises InvalidArgument for a bad name or value."""
        parse = SETTINGS.get(name)
        if parse is None:
            similar = get_close_matches(name.lower(), SETTINGS, 1)
            suggestion = f"did you mean {similar[0]}? T" if similar else "t"
            raise InvalidArgument(
                f"there is no setting {name!r}; {suggestion}he settings are {', '.join(SETTINGS)}"
            )
        try:
            parsed = parse(value)
        except ValueError:
            raise InvalidArgument(f"{name} must be {_EXPECTED[parse]}; found {value!r}") from None
        if name in SWITCHES:
            setattr(self, SWITCHES[name], parsed)
        elif name == "max-tokens":
            max_tokens = None if parsed < 0 else parsed
            self._check_limits(self.sampling, max_tokens)
            self.max_tokens = max_tokens
        else:
            changed = dataclasses.replace(self.sampling, **{name.replace("-", "_"): parsed})
            self._check_limits(changed, self.max_tokens)
            self._resolved_sampling = changed.resolve(self.defaults, self.seed)  # checks the range
            self.sampling = changed

    def _check_limits(self, sampling: SamplingOptions, max_tokens: int | None) -> None:
        values = {**vars(sampling), "max_tokens": max_tokens}
        for name, limit in self.limits.items():
            if values[name] is not None and values[name] > limit:
                label = name.replace("_", "-")
                raise InvalidArgument(f"{label} must be at most {limit:,}; found {values[name]:,}")

    def lines(self) -> list[str]:
        """Return a line with the name and value of each setting."""
        return [f"  {name:<18}  {self._value_text(name)}" for name in SETTINGS]

    def _value_text(self, name: str) -> str:
        if name in SWITCHES:
            return "on" if getattr(self, SWITCHES[name]) else "off"
        if name == "max-tokens":
            return "-1 (no limit)" if self.max_tokens is None else str(self.max_tokens)
        field_name = name.replace("-", "_")
        value = getattr(self.sampling, field_name)
        if name == "seed" and value is None:
            return f"{self.seed} (random)" if self.seed is not None else "random"
        if value is None:
            return str(getattr(self.defaults, field_name, "the server's default"))
        return ", ".join(map(repr, value)) or "none" if name == "stop" else str(value)


def _parse_switch(text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError(text)
    return text.lower() in _ON


def _parse_max_tokens(text: str) -> int:
    max_tokens = int(text)
    if max_tokens < -1:
        raise ValueError(text)
    return max_tokens


def _parse_stop(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


_EXPECTED: dict[Callable[[str], Any], str] = {  # by parser, for error messages
    float: "a number",
    int: "a whole number",
    _parse_max_tokens: "a whole number; -1 for no limit",
    _parse_switch: "on or off",
}
SETTINGS: dict[str, Callable[[str], Any]] = {  # by name: the parser of its value
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    "repetition-penalty": float,
    "repetition-window": int,
    "seed": int,
    "stop": _parse_stop,
    "max-tokens": _parse_max_tokens,
    **dict.fromkeys(SWITCHES, _parse_switch),
}
