"""Two long texts that every Python has, and nothing of one is in the other."""

import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.docstrings import MODULES, docstrings_text, word_runs
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.evaluate.manual import manual_text


@pytest.fixture(scope="module")
def docstrings() -> str:
    return docstrings_text()


def test_no_eight_words_in_a_row_are_in_both_texts(docstrings: str) -> None:
    manual = word_runs(manual_text())
    for paragraph in docstrings.split("\n\n"):
        assert not word_runs(paragraph) & manual


def test_nothing_is_said_twice(docstrings: str) -> None:
    known: set[tuple[str, ...]] = set()
    for paragraph in docstrings.split("\n\n"):
        runs = word_runs(paragraph)
        assert runs
        assert not runs & known
        known |= runs


def test_docstrings_are_long_english_and_no_interpreter_sessions(docstrings: str) -> None:
    assert len(docstrings) > 200_000
    assert ">>>" not in docstrings
    assert len(docstrings.split()) * 9 > len(docstrings)
    haystack = Haystack.of(docstrings, lambda text: len(text) // 4 + 1)
    assert len(haystack.sentences) > 1500


def test_docstrings_are_the_same_each_time_and_no_module_is_imported_for_them(
    docstrings: str,
) -> None:
    loaded = set(sys.modules)
    assert docstrings_text.__wrapped__() == docstrings
    assert set(sys.modules) == loaded
    assert all(one < other for one, other in pairwise(MODULES))


def test_a_library_without_its_sources_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"_pydecimal\.py is not there: take the manual"):
        docstrings_text.__wrapped__()


def test_each_text_has_a_name() -> None:
    assert list(TEXTS) == ["manual", "docstrings"]
    assert TEXTS["manual"]() == manual_text()
