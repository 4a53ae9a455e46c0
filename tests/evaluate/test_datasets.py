"""Datasets: where facts are hidden, and that questions come after the text."""

import pytest
from small_models import small_model
from topics import topic_text

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import (
    JUNK,
    PASSKEY_TASKS,
    PREFIX,
    Dataset,
    NeedleDataset,
    PasskeyDataset,
)
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.samples import KEY_TYPES, Placement
from kvkeep.evaluate.words import NAMES, WORDS


def count(text: str) -> int:
    return len(text) // 4 + 1


HAYSTACK = Haystack.from_text(topic_text(), count)


def _datasets(**settings: object) -> list[Dataset]:
    return [
        PasskeyDataset(junk=30, **settings),
        NeedleDataset(HAYSTACK, passage_tokens=600, **settings),
    ]


@pytest.mark.parametrize("place", [0, 1, 17, 29])
def test_the_pass_key_precedes_the_requested_repetition(place: int) -> None:
    sample = PasskeyDataset(junk=30, placement=Placement(place)).sample(0)
    key = sample.facts[0].answer
    before, after = sample.text.split(
        f" The pass key is {key}. Remember it. {key} is the pass key."
    )
    assert before == PREFIX + place * JUNK
    assert after == (30 - place) * JUNK
    assert sample.facts[0].question == " What is the pass key? The pass key is"


@pytest.mark.parametrize("keys", KEY_TYPES)
@pytest.mark.parametrize("task", PASSKEY_TASKS)
def test_samples_contain_each_fact_once_and_no_question(task: str, keys: str) -> None:
    for dataset in _datasets(task=task, key_type=keys):
        for index in range(20):
            sample = dataset.sample(index)
            assert len(sample.facts) == PASSKEY_TASKS[task][1]
            assert len({fact.answer for fact in sample.facts}) == len(sample.facts)
            for fact in sample.facts:
                assert sample.text.count(fact.sentence) == 1
                assert fact.answer in fact.sentence
                assert fact.question.strip() not in sample.text
                assert fact.answer not in fact.question


def test_task_several_asks_for_one_person_by_name() -> None:
    sample = PasskeyDataset(junk=30, task="several").sample(0)
    assert sample.text.count("Remember it") == PASSKEY_TASKS["several"][0]
    name = sample.facts[0].question.split()[-2]
    assert f"The pass key of {name} is {sample.facts[0].answer}." in sample.text


def test_samples_cycle_through_the_depths() -> None:
    depths = (0.0, 25.0, 50.0, 100.0)
    for dataset in _datasets(placement=Placement(depths=depths)):
        for index in range(8):
            sample = dataset.sample(index)
            assert sample.depth == pytest.approx(depths[index % 4], abs=60 / sample.position_count)
            share = sample.text.index(sample.facts[0].sentence) / len(sample.text)
            assert abs(100 * share - sample.depth) < 40


def test_samples_are_reproducible_and_differ_by_index_and_seed() -> None:
    for copy, dataset in zip(_datasets(seed=3), _datasets(seed=3), strict=True):
        assert [copy.sample(i) for i in (2, 0)] == [dataset.sample(i) for i in (2, 0)]
        samples = [dataset.sample(index) for index in range(20)]
        assert len({sample.facts[0].answer for sample in samples}) == 20
        assert len({sample.position for sample in samples}) > 3
    for one, other in zip(_datasets(seed=3), _datasets(seed=4), strict=True):
        assert one.sample(0) != other.sample(0)


def test_a_passage_comes_from_the_text_and_has_the_requested_length() -> None:
    text = topic_text()
    starts = set()
    for index in range(20):
        sample = NeedleDataset(HAYSTACK, passage_tokens=600).sample(index)
        fact = sample.facts[0].sentence
        before, after = sample.text.split(fact)
        assert before + after in text
        assert 300 < count(before + after) <= 600
        starts.add(text.index(before + after))
    assert len(starts) == 20


def test_a_passage_that_ends_early_at_a_long_table_is_drawn_again() -> None:
    short, table = "A short one here.", "A table of " + 400 * "many rows and " + "an end."
    haystack = Haystack.from_text(" ".join([*[*[short] * 40, table] * 5, *[short] * 40]), count)
    for index in range(40):
        sample = NeedleDataset(haystack, passage_tokens=100).sample(index)
        assert count(sample.text) >= 75


def test_a_passage_may_be_the_whole_text_but_not_longer() -> None:
    haystack = Haystack.from_text("One here. Two here. Three here.", count)
    total = sum(haystack.token_counts)
    sample = NeedleDataset(haystack, passage_tokens=total).sample(0)
    assert sample.text.replace(sample.facts[0].sentence, "") == "One here. Two here. Three here."
    with pytest.raises(InvalidArgument, match="use fewer"):
        NeedleDataset(haystack, passage_tokens=total + 1).sample(0)


def test_keys_are_five_digits_or_three_words() -> None:
    for index in range(20):
        number = PasskeyDataset(key_type="number").sample(index).facts[0].answer
        assert len(number) == 5
        assert 10_000 <= int(number) < 100_000
        words = PasskeyDataset(key_type="words").sample(index).facts[0].answer.split("-")
        assert len(set(words)) == 3
        assert set(words) <= set(WORDS)


def test_word_lists_are_long_and_have_no_duplicates() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert all(word.isalpha() and word.istitle() for word in WORDS + NAMES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"junk": 3, "task": "several"}, "found 3 repetitions"),
        ({"junk": 10, "placement": Placement(10)}, "must be 0 to 9"),
        ({"task": "third"}, "expected one of single, several, second; found 'third'"),
        ({"key_type": "letters"}, "found 'letters'"),
    ],
)
def test_invalid_passkey_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PasskeyDataset(**settings)


def test_a_depth_outside_the_text_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="found 101"):
        Placement(depths=(0, 101))


def test_text_and_question_tokenize_the_same_apart_and_together() -> None:
    encode = small_model().text.encode
    sample = PasskeyDataset(junk=5).sample(0)
    question = sample.facts[0].question
    assert encode(sample.text) + encode(question) == encode(sample.text + question)


def test_the_shortest_passages_have_as_many_sentences_as_there_are_facts() -> None:
    """The text ends with a sentence that is longer than the passage."""
    sentences = [*["A short one here."] * 40, "A long one with " + "many " * 60 + "words."]
    haystack = Haystack.from_text(" ".join(sentences), count)
    for index in range(20):
        sample = NeedleDataset(haystack, passage_tokens=16, task="several").sample(index)
        assert len(sample.facts) >= 1
