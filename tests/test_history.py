"""A session's tokens: a sequence that never changes, equals a list and copies nothing."""

import random
import threading

import pytest
from interrupts import broken_off_at, lines_of
from small_models import small_model

from kvkeep.session.history import History

MODEL = small_model()


def test_it_is_a_sequence_of_its_numbers() -> None:
    numbers = list(range(5, 25))
    history = History("i", numbers)
    assert history == numbers
    assert numbers == history
    assert history == History("i", numbers)
    assert history != numbers[:-1]
    assert history != [*numbers[:-1], 0]
    assert list(history) == list(reversed(list(reversed(history)))) == history.tolist() == numbers
    assert (len(history), history[0], history[-1], 7 in history) == (20, 5, 24, True)
    assert repr(history) == repr(numbers)
    assert history.first(17).last(3).tolist() == numbers[14:17]
    assert history.first(17).last(99).tolist() == numbers[:17]
    for index in (20, -21):
        with pytest.raises(IndexError):
            history[index]
    bounds = [None, *range(-25, 25, 3)]
    for part in (slice(a, b, c) for a in bounds for b in bounds for c in (None, 2, -1, -3)):
        assert history.first(17)[part] == numbers[:17][part]


def test_what_comes_after_it_changes_it_not() -> None:
    draw, known = random.Random(1), [(History("q"), list[int]())]
    for _ in range(300):
        history, numbers = draw.choice(known)
        more = [draw.randrange(100) for _ in range(draw.randrange(4))]
        kind = draw.randrange(3)
        if kind == 0:
            known.append((history.extended(more), numbers + more))
        elif kind == 1:
            left = draw.randrange(len(numbers) + 1)
            known.append((history.first(left), numbers[:left]))
        else:
            a, b = sorted(draw.randrange(len(numbers) + 1) for _ in "ab")
            known.append((history.replaced(a, b, more), numbers[:a] + more + numbers[b:]))
    for history, numbers in known:
        assert history == numbers


def test_a_number_that_is_none_leaves_it_as_it_was() -> None:
    history = History("i", [1, 2])
    for bad in ([3, "x"], [2**40]):
        with pytest.raises((TypeError, OverflowError)):
            history.extended(bad)
    assert history.extended([3]) == [1, 2, 3]


def test_threads_that_extend_one_history_do_not_meet() -> None:
    start, found = History("i", [0]), dict[int, History]()

    def extend(thread: int) -> None:
        history = start
        for _ in range(2000):
            history = history.extended([thread])
        found[thread] = history

    threads = [threading.Thread(target=extend, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread, history in found.items():
        assert history == [0] + [thread] * 2000


def test_broken_off_at_any_line_it_neither_changes_nor_keeps_others_waiting() -> None:
    start = History("i", [1])
    for line in range(lines_of(lambda: start.extended([2]))):
        history = History("i", [1])
        assert broken_off_at(line, lambda history=history: history.extended([2]))
        assert history.extended([3]).extended([4]) == [1, 3, 4]
        assert history == [1]


def test_a_sessions_tokens_are_no_copy_and_stay_what_they_were() -> None:
    session = MODEL.session(16)
    session.feed([1, 2, 3])
    before, fork = session.tokens, session.fork()
    assert session.tokens is before
    session.feed([4, 5])
    fork.feed([6])
    assert (before, session.tokens, fork.tokens) == ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 6])
    storage = session.tokens._numbers
    for _ in range(50):
        session.next_token()
    assert session.tokens._numbers is storage  # a token more copied nothing
    long = session.tokens
    session.rewind(5)
    assert session.tokens == long[:-5]
    assert MODEL.text.decode(session.tokens) == session.text()
