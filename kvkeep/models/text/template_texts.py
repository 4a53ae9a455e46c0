"""A chat template's source, its compiled code, and the texts that it states."""

from collections.abc import Callable, Collection
from types import CodeType


class TemplateTexts:
    """A template, and the texts that it states, recorded when it is first compiled.

    A template may write a control token in parts, such as "<|" + role + "|>" in Phi-4's.
    compiled: its code, once it was compiled.
    """

    def __init__(self, source: str, seal: Callable[[str], str]):
        self.source = source
        self.compiled: CodeType | None = None
        self._seal, self._texts = seal, frozenset[str]()

    def convert(self, text: str) -> str:
        """Record a text of the template, and return it with secret names."""
        if text not in self._texts:  # replaced, since other threads may be looking through it
            self._texts |= {text}
        return self._seal(text)

    def composes(self, control_text: str, roles: Collection[str]) -> bool:
        """Whether the template can write a control token's text around one of the roles."""
        for role in roles:
            before, found, after = control_text.partition(role)
            if (
                found
                and any(before and text.endswith(before) for text in self._texts)
                and any(after and text.startswith(after) for text in self._texts)
            ):
                return True
        return False
