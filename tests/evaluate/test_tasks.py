"""Tasks: hidden sentences, their questions, and reproducible samples."""

import hashlib
import re
from random import Random

import pytest
from topics import topic_text

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import NeedleDataset, PasskeyDataset
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.recall import EXTRA_TOKENS, MAX_QUESTION_TOKENS
from kvkeep.evaluate.samples import Placement, sample_rng
from kvkeep.evaluate.tasks import TASKS, TaskInstance
from kvkeep.evaluate.words import CODE_WORDS, NAMES, WORDS
from kvkeep.model import Model

TASKS_AND_KEY_TYPES = [(task, keys) for task in TASKS for keys in TASKS[task].key_types]


def count(text: str) -> int:
    return len(text) // 4 + 1


HAYSTACK = Haystack.from_text(topic_text(), count)


def generate(task: str, keys: str, seed: int) -> TaskInstance:
    return TASKS[task].generate(Random(seed), keys)


@pytest.mark.parametrize(("task", "keys"), TASKS_AND_KEY_TYPES)
def test_the_text_contains_all_answers_and_no_question(task: str, keys: str) -> None:
    for index in range(20):
        instance = generate(task, keys, index)
        sample = NeedleDataset(HAYSTACK, 600, keys, task).sample(index)
        assert len(sample.facts) == len(instance.facts)
        for fact in sample.facts:
            assert sample.text.count(fact.sentence) == 1
            assert fact.answer in fact.sentence
            assert fact.question.startswith("\n\n")
            assert fact.question.strip() not in sample.text
            assert not re.search(rf"\b{fact.answer}\b", fact.question)


@pytest.mark.parametrize(("task", "keys"), TASKS_AND_KEY_TYPES)
def test_task_samples_are_reproducible_and_differ_by_index(task: str, keys: str) -> None:
    one, other = (
        NeedleDataset(HAYSTACK, 600, keys, task, seed=3),
        NeedleDataset(HAYSTACK, 600, keys, task, seed=3),
    )
    samples = [one.sample(index) for index in (5, 0)]
    assert samples == [other.sample(index) for index in (5, 0)]
    assert len({one.sample(index).text for index in range(10)}) == 10


@pytest.mark.parametrize(("task", "keys"), TASKS_AND_KEY_TYPES)
def test_the_text_is_changed_by_the_hidden_sentences_only(task: str, keys: str) -> None:
    text = NeedleDataset(HAYSTACK, 600, keys, task).sample(0).text
    for sentence in TASKS[task].generate(sample_rng(0, 0), keys).sentences:
        assert sentence in text
        text = text.replace(sentence, "", 1)
    assert text in topic_text()


@pytest.mark.parametrize(("task", "keys"), TASKS_AND_KEY_TYPES)
def test_questions_and_answers_fit_into_the_reserved_tokens(
    task: str, keys: str, smollm2: Model
) -> None:
    encode = smollm2.text.encode
    for seed in range(20):
        for fact in generate(task, keys, seed).facts:
            assert (
                len(encode(f"{fact.question} {fact.answer}")) + EXTRA_TOKENS <= MAX_QUESTION_TOKENS
            )


def test_multivalue_names_all_values_but_one_and_asks_for_any_of_them() -> None:
    places = set()
    for index in range(40):
        instance = generate("multivalue", "number", index)
        values = [re.findall(r"\d{5}", sentence)[0] for sentence in instance.sentences]
        asked = instance.facts[0]
        assert len(set(values)) == 3
        assert sorted([*re.findall(r"\d{5}", asked.question), asked.answer]) == sorted(values)
        sample = NeedleDataset(HAYSTACK, 600, task="multivalue").sample(index)
        found = sorted(sample.text.index(f" {value}.") for value in _values(sample.text))
        places.add(found.index(sample.text.index(f" {sample.facts[0].answer}.")))
    assert places == {0, 1, 2}


def _values(text: str) -> list[str]:
    return re.findall(r"One of the [\w ]+ is (\d{5})\.", text)


def test_multiquery_asks_for_every_hidden_fact() -> None:
    instance = generate("multiquery", "number", 0)
    assert len(instance.sentences) == len(instance.facts) == 4
    assert [fact.sentence for fact in instance.facts] == list(instance.sentences)


@pytest.mark.parametrize("placement", [Placement(), Placement(depths=(0, 50, 100))])
def test_variable_assignments_keep_their_order_and_lead_to_the_value(placement: Placement) -> None:
    for index in range(12):
        sample = NeedleDataset(HAYSTACK, 600, task="variables", placement=placement).sample(index)
        links = [re.search(r"VAR (\w+) = (\w+)\.$", fact.sentence) for fact in sample.facts]
        assert all(links)
        names, values = zip(*(link.groups() for link in links if link), strict=True)
        assert len(set(names)) == 3
        assert values == (sample.facts[0].answer, *names[:-1])
        places = [sample.text.index(fact.sentence) for fact in sample.facts]
        assert places == sorted(places)


@pytest.mark.parametrize(("task", "pool"), [("common", WORDS), ("frequent", CODE_WORDS)])
def test_word_count_tasks_ask_for_the_most_frequent_words(task: str, pool: tuple[str, ...]) -> None:
    for seed in range(20):
        instance = generate(task, "words", seed)
        said = re.findall(r"\w+", " ".join(line.split(":")[1] for line in instance.sentences))
        assert set(said) <= set(pool)
        frequent = sorted(set(said), key=said.count, reverse=True)
        assert said.count(frequent[2]) > 2 * said.count(frequent[3])
        [fact] = instance.facts
        named = set(re.findall(r"\w+", fact.question)) & set(pool)
        assert named | {fact.answer} == set(frequent[:3])
        assert fact.answer not in named


def test_reworded_questions_share_only_the_name_with_the_text() -> None:
    for seed in range(200):
        instance = generate("reworded", TASKS["reworded"].key_types[0], seed)
        [fact] = instance.facts
        said = set(re.findall(r"\w+", fact.sentence.lower()))
        asked = set(re.findall(r"\w+", fact.question.lower()))
        names = {name.lower() for name in NAMES}
        assert len(said & asked & names) == 1
        assert {word for word in said & asked - names if len(word) > 3} == set()


@pytest.mark.parametrize(
    ("task", "keys", "message"),
    [
        ("common", "number", "expected one of words; found 'number'"),
        ("single", "letters", "expected one of number, words; found 'letters'"),
        ("third", None, "expected one of single, several, second, multivalue"),
    ],
)
def test_unknown_tasks_and_unsupported_key_types_are_refused(
    task: str, keys: str | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        NeedleDataset(HAYSTACK, 600, keys, task)


DULL = " ".join(f"This is sentence {n} of a long and dull text." for n in range(200))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("single", "dd4e2d44fe1bd7ea"),
        ("several", "550231e74a8d3d08"),
        ("second", "1c00d1cb906657a4"),
    ],
)
def test_samples_equal_those_of_published_figures(task: str, expected: str) -> None:
    haystack, digest = Haystack.from_text(DULL, count), hashlib.sha256()
    for keys in ("number", "words"):
        for dataset in (
            PasskeyDataset(30, keys, task, seed=7),
            NeedleDataset(haystack, 600, keys, task, Placement(depths=(0, 50, 100)), 7),
            NeedleDataset(haystack, 600, keys, task, seed=7),
        ):
            for index in range(5):
                sample = dataset.sample(index)
                asked = (fact.question + fact.answer for fact in sample.facts)
                row = (sample.text, str(sample.position), str(sample.position_count), *asked)
                digest.update("|".join(row).encode())
    assert digest.hexdigest()[:16] == expected
