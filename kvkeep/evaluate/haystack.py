"""Long real texts that facts are hidden in: Python's manual, and docstrings of its library.

Calibrations use the manual. The docstrings have nothing in common with it.
"""

import ast
import itertools
import re
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Self

from kvkeep.errors import InvalidArgument

SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s+[A-Z])")
MAX_DRAWS = 100  # of a passage
MIN_LENGTH_SHARE = 0.75  # of a passage: the share of the requested tokens
RUN_WORDS = 8  # texts with a common run of so many words count as duplicates
MIN_DOCSTRING_CHARACTERS = 200  # characters of a docstring that is used
INTERPRETER_PROMPT = ">>>"
_MODULES = """
    _pydecimal _pyio argparse asyncio/events asyncio/tasks codecs concurrent/futures/_base
    configparser difflib email/_policybase email/message fractions functools heapq http/cookiejar
    http/server inspect ipaddress json/__init__ logging/__init__ logging/handlers mimetypes optparse
    os pkgutil random shutil smtplib socketserver statistics string subprocess textwrap threading
    timeit traceback unittest/case unittest/mock urllib/parse uuid wave xml/etree/ElementTree
    xml/sax/handler xml/sax/xmlreader xmlrpc/server
"""
MODULES = tuple(_MODULES.split())


@dataclass(frozen=True)
class Haystack:
    """A long text as sentences, with the approximate number of tokens of each."""

    sentences: tuple[str, ...]
    token_counts: tuple[int, ...]

    @classmethod
    def from_text(cls, text: str, count_tokens: Callable[[str], int]) -> Self:
        sentences = tuple(SENTENCE_END.split(text))
        return cls(sentences, tuple(count_tokens(sentence) for sentence in sentences))

    def passage(self, tokens: int, min_sentences: int, rng: Random) -> list[str]:
        """Return consecutive sentences from a random start, of about `tokens` tokens in all.

        A passage that ends far too early, before a long table or program, is drawn again.
        min_sentences: even if they have more tokens. Raises InvalidArgument for a short text.
        """
        sentence_ends = list(itertools.accumulate(self.token_counts))  # in tokens
        last_start = min(
            bisect_right(sentence_ends, sentence_ends[-1] - tokens),
            len(self.sentences) - min_sentences,
        )
        if tokens > sentence_ends[-1] or last_start < 0:
            raise InvalidArgument(
                f"the text has {sentence_ends[-1]:,} tokens: too few for {tokens:,} in at least "
                f"{min_sentences} sentences; use fewer"
            )
        for _ in range(MAX_DRAWS):
            start = rng.randrange(last_start + 1)
            tokens_before = sentence_ends[start] - self.token_counts[start]
            end = max(bisect_right(sentence_ends, tokens_before + tokens), start + min_sentences)
            if sentence_ends[end - 1] - tokens_before >= MIN_LENGTH_SHARE * tokens:
                break
        return list(self.sentences[start:end])


def manual_text() -> str:
    """Return the sorted topics of Python's `help`: 113,108 SmolLM2 tokens in Python 3.11."""
    from pydoc_data.topics import topics  # most of a megabyte

    return "\n".join(topics[name] for name in sorted(topics))


@cache  # takes a second
def docstrings_text() -> str:
    """Return paragraphs of docstrings of `MODULES`: 83,251 SmolLM2 tokens in Python 3.11.

    Paragraphs of fewer than eight words are left out, and those with a run of eight words from the
    manual or an earlier paragraph. Raises InvalidArgument if Python's library has no sources.
    """
    known_runs = word_runs(manual_text())
    paragraphs = []
    for docstring in itertools.chain(*map(_docstrings, MODULES)):
        for paragraph in re.split(r"\n\s*\n", docstring):
            if INTERPRETER_PROMPT in paragraph:
                continue
            runs = word_runs(paragraph)
            if runs and not runs & known_runs:
                paragraphs.append(paragraph.rstrip())
                known_runs |= runs
    return "\n\n".join(paragraphs)


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `RUN_WORDS` words, ignoring case and punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + RUN_WORDS]) for start in range(len(words) - RUN_WORDS + 1)}


TEXTS: dict[str, Callable[[], str]] = {"manual": manual_text, "docstrings": docstrings_text}
MANUAL = "manual"


def _docstrings(module: str) -> Iterator[str]:
    """Yield a module's long docstrings in the order of its file."""
    path = Path(sysconfig.get_path("stdlib"), f"{module}.py")
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(
            f"the docstrings come from the sources of Python's library, and {path} does not exist: "
            "use the manual instead"
        ) from error
    documented_nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented_nodes)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) >= MIN_DOCSTRING_CHARACTERS:
            yield docstring
