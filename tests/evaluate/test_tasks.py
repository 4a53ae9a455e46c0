"""What each task hides can be found, and is asked for only after it was read."""

import hashlib
import re
from random import Random

import pytest
from topics import topic_text

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import Where, random_of
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.needle import Needle
from kvkeep.evaluate.passkey import Passkey
from kvkeep.evaluate.recall import ROOM_TO_ASK, SPARE
from kvkeep.evaluate.tasks import TASKS, Posed
from kvkeep.evaluate.words import CODE_WORDS, NAMES, WORDS
from kvkeep.model import Model

ALL = [(task, keys) for task in TASKS for keys in TASKS[task].keys]


def count(text: str) -> int:
    return len(text) // 4 + 1


HAYSTACK = Haystack.of(topic_text(), count)


def posed(task: str, keys: str, seed: int) -> Posed:
    return TASKS[task].pose(Random(seed), keys)


@pytest.mark.parametrize(("task", "keys"), ALL)
def test_all_that_is_asked_for_is_in_the_text_and_the_questions_are_not(
    task: str, keys: str
) -> None:
    for index in range(20):
        drawn = posed(task, keys, index)
        sample = Needle(HAYSTACK, 600, keys, task).sample(index)
        assert len(sample.asked) == len(drawn.asked)
        for fact in sample.asked:
            assert sample.text.count(fact.sentence) == 1
            assert fact.answer in fact.sentence
            assert fact.question.startswith("\n\n")
            assert fact.question.strip() not in sample.text
            assert not re.search(rf"\b{fact.answer}\b", fact.question)


@pytest.mark.parametrize(("task", "keys"), ALL)
def test_a_task_says_the_same_for_the_same_seed_and_else_another_thing(
    task: str, keys: str
) -> None:
    one, other = (
        Needle(HAYSTACK, 600, keys, task, seed=3),
        Needle(HAYSTACK, 600, keys, task, seed=3),
    )
    later = [one.sample(index) for index in (5, 0)]
    assert later == [other.sample(index) for index in (5, 0)]
    assert len({one.sample(index).text for index in range(10)}) == 10


@pytest.mark.parametrize(("task", "keys"), ALL)
def test_nothing_but_the_sentences_is_put_into_the_text(task: str, keys: str) -> None:
    left = Needle(HAYSTACK, 600, keys, task).sample(0).text
    for sentence in TASKS[task].pose(random_of(0, 0), keys).sentences:
        assert sentence in left
        left = left.replace(sentence, "", 1)
    assert left in topic_text()


@pytest.mark.parametrize(("task", "keys"), ALL)
def test_a_question_and_its_answer_fit_into_the_room_that_is_left_for_them(
    task: str, keys: str, smollm2: Model
) -> None:
    encode = smollm2.text.encode
    for seed in range(20):
        for fact in posed(task, keys, seed).asked:
            assert len(encode(f"{fact.question} {fact.answer}")) + SPARE <= ROOM_TO_ASK


def test_all_values_of_a_name_but_one_are_named_and_each_is_asked_for_in_some_sample() -> None:
    places = set()
    for index in range(40):
        drawn = posed("multivalue", "number", index)
        values = [re.findall(r"\d{5}", sentence)[0] for sentence in drawn.sentences]
        asked = drawn.asked[0]
        assert len(set(values)) == 3
        assert sorted([*re.findall(r"\d{5}", asked.question), asked.answer]) == sorted(values)
        sample = Needle(HAYSTACK, 600, task="multivalue").sample(index)
        found = sorted(sample.text.index(f" {value}.") for value in _values(sample.text))
        places.add(found.index(sample.text.index(f" {sample.asked[0].answer}.")))
    assert places == {0, 1, 2}


def _values(text: str) -> list[str]:
    return re.findall(r"One of the [\w ]+ is (\d{5})\.", text)


def test_every_one_of_several_queries_is_asked_for() -> None:
    drawn = posed("multiquery", "number", 0)
    assert len(drawn.sentences) == len(drawn.asked) == 4
    assert [fact.sentence for fact in drawn.asked] == list(drawn.sentences)


@pytest.mark.parametrize("where", [Where(), Where(depths=(0, 50, 100))])
def test_a_chain_of_variables_is_read_in_its_order_and_ends_at_the_value(where: Where) -> None:
    for index in range(12):
        sample = Needle(HAYSTACK, 600, task="variables", where=where).sample(index)
        links = [re.search(r"VAR (\w+) = (\w+)\.$", fact.sentence) for fact in sample.asked]
        assert all(links)
        names, values = zip(*(link.groups() for link in links if link), strict=True)
        assert len(set(names)) == 3
        assert values == (sample.asked[0].answer, *names[:-1])
        places = [sample.text.index(fact.sentence) for fact in sample.asked]
        assert places == sorted(places)


@pytest.mark.parametrize(("task", "pool"), [("common", WORDS), ("frequent", CODE_WORDS)])
def test_the_words_asked_for_are_those_said_most_often(task: str, pool: tuple[str, ...]) -> None:
    for seed in range(20):
        drawn = posed(task, "words", seed)
        said = re.findall(r"\w+", " ".join(line.split(":")[1] for line in drawn.sentences))
        assert set(said) <= set(pool)
        often = sorted(set(said), key=said.count, reverse=True)
        assert said.count(often[2]) > 2 * said.count(often[3])
        [fact] = drawn.asked
        named = set(re.findall(r"\w+", fact.question)) & set(pool)
        assert named | {fact.answer} == set(often[:3])
        assert fact.answer not in named


def test_what_is_reworded_has_no_word_of_the_text_but_the_name() -> None:
    for seed in range(200):
        drawn = posed("reworded", TASKS["reworded"].keys[0], seed)
        [fact] = drawn.asked
        said = set(re.findall(r"\w+", fact.sentence.lower()))
        asked = set(re.findall(r"\w+", fact.question.lower()))
        names = {name.lower() for name in NAMES}
        assert len(said & asked & names) == 1
        assert {word for word in said & asked - names if len(word) > 3} == set()


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        ("common", "number", "expected one of words; found 'number'"),
        ("single", "letters", "expected one of number, words; found 'letters'"),
        ("third", None, "expected one of single, several, second, multivalue"),
    ],
)
def test_a_task_is_refused_keys_that_it_has_not(task: str, keys: str | None, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Needle(HAYSTACK, 600, keys, task)


DULL = " ".join(f"This is sentence {n} of a long and dull text." for n in range(200))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("single", "dd4e2d44fe1bd7ea"),
        ("several", "550231e74a8d3d08"),
        ("second", "1c00d1cb906657a4"),
    ],
)
def test_samples_are_those_that_published_figures_were_measured_on(
    task: str, expected: str
) -> None:
    haystack, digest = Haystack.of(DULL, count), hashlib.sha256()
    for keys in ("number", "words"):
        for experiment in (
            Passkey(30, keys, task, seed=7),
            Needle(haystack, 600, keys, task, Where(depths=(0, 50, 100)), 7),
            Needle(haystack, 600, keys, task, seed=7),
        ):
            for index in range(5):
                sample = experiment.sample(index)
                asked = (fact.question + fact.answer for fact in sample.asked)
                row = (sample.text, str(sample.position), str(sample.places), *asked)
                digest.update("|".join(row).encode())
    assert digest.hexdigest()[:16] == expected
