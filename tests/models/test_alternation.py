"""Patterns for the texts of control tokens, of which some vocabularies have a thousand."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.models.text.alternation import alternation

_texts = st.text("ab<|[.\n", max_size=6)
_lists = st.lists(st.text("ab<|[.\n", min_size=1, max_size=6), max_size=12, unique=True)


@given(texts=_lists, pieces=st.lists(_texts | st.integers(0, 11), max_size=12))
def test_the_longest_of_the_texts_is_found_at_each_place(
    texts: list[str], pieces: list[str | int]
) -> None:
    flat = "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
    known = [
        texts[piece % len(texts)] if isinstance(piece, int) and texts else piece for piece in pieces
    ]
    text = "".join(map(str, known))
    expected = [(match.start(), match[0]) for match in re.finditer(flat, text)]
    assert [(match.start(), match[0]) for match in alternation(texts).finditer(text)] == expected


def test_texts_with_a_common_start_are_tried_together() -> None:
    texts = ["[INST]", "<unk>", "<s>", *(f"<SPECIAL_{n}>" for n in range(20, 1000))]
    pattern = alternation(texts)
    assert pattern.pattern.count("SPECIAL") == 1
    assert all(pattern.fullmatch(text) for text in texts)
    assert not pattern.search("<SPECIAL_1000> <div> <SPECIAL_19>")


def test_texts_that_begin_one_another_are_found_whatever_their_number() -> None:
    texts = ["<" * length for length in range(1, 400)]
    pattern = alternation(texts)
    assert all(pattern.match(text + ">")[0] == text for text in texts)
    assert not alternation(()).search("a")
