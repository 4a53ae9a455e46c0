"""Haystacks: two long texts that come with Python and share no passage."""

import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import (
    MODULES,
    TEXTS,
    Haystack,
    docstrings_text,
    manual_text,
    word_runs,
)


@pytest.fixture(scope="module")
def docstrings() -> str:
    return docstrings_text()


def test_the_two_texts_share_no_run_of_eight_words(docstrings: str) -> None:
    manual = word_runs(manual_text())
    for paragraph in docstrings.split("\n\n"):
        assert not word_runs(paragraph) & manual


def test_docstrings_repeat_no_run_of_eight_words(docstrings: str) -> None:
    known: set[tuple[str, ...]] = set()
    for paragraph in docstrings.split("\n\n"):
        runs = word_runs(paragraph)
        assert runs
        assert not runs & known
        known |= runs


def test_docstrings_are_long_prose_without_interpreter_sessions(docstrings: str) -> None:
    assert len(docstrings) > 200_000
    assert ">>>" not in docstrings
    assert len(docstrings.split()) * 9 > len(docstrings)
    haystack = Haystack.from_text(docstrings, lambda text: len(text) // 4 + 1)
    assert len(haystack.sentences) > 1500


def test_docstrings_are_deterministic_and_import_no_module(
    docstrings: str,
) -> None:
    loaded = set(sys.modules)
    assert docstrings_text.__wrapped__() == docstrings
    assert set(sys.modules) == loaded
    assert all(one < other for one, other in pairwise(MODULES))


def test_a_python_without_library_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"_pydecimal\.py does not exist: use the manual"):
        docstrings_text.__wrapped__()


def test_texts_are_listed_by_name() -> None:
    assert list(TEXTS) == ["manual", "docstrings"]
    assert TEXTS["manual"]() == manual_text()
