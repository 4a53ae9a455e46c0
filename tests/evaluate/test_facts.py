"""Facts lie where they were asked to lie, and nothing of a question comes before it is asked."""

import pytest
from small_models import small_model
from topics import topic_text

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.facts import KEYS, Samples, Where
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.needle import Needle
from kvkeep.evaluate.passkey import JUNK, PASSKEY_TASKS, PREFIX, Passkey
from kvkeep.evaluate.words import NAMES, WORDS


def count(text: str) -> int:
    return len(text) // 4 + 1


HAYSTACK = Haystack.of(topic_text(), count)


def _experiments(**settings: object) -> list[Samples]:
    return [Passkey(junk=30, **settings), Needle(HAYSTACK, tokens=600, **settings)]


@pytest.mark.parametrize("place", [0, 1, 17, 29])
def test_the_pass_key_comes_before_the_repetition_asked_for(place: int) -> None:
    sample = Passkey(junk=30, where=Where(place)).sample(0)
    key = sample.asked[0].answer
    before, after = sample.text.split(
        f" The pass key is {key}. Remember it. {key} is the pass key."
    )
    assert before == PREFIX + place * JUNK
    assert after == (30 - place) * JUNK
    assert sample.asked[0].question == " What is the pass key? The pass key is"


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("task", PASSKEY_TASKS)
def test_each_fact_is_there_and_no_question_is(task: str, keys: str) -> None:
    for experiment in _experiments(task=task, keys=keys):
        for index in range(20):
            sample = experiment.sample(index)
            assert len(sample.asked) == PASSKEY_TASKS[task][1]
            assert len({fact.answer for fact in sample.asked}) == len(sample.asked)
            for fact in sample.asked:
                assert sample.text.count(fact.sentence) == 1
                assert fact.answer in fact.sentence
                assert fact.question.strip() not in sample.text
                assert fact.answer not in fact.question


def test_of_several_people_the_one_asked_for_is_named() -> None:
    sample = Passkey(junk=30, task="several").sample(0)
    assert sample.text.count("Remember it") == PASSKEY_TASKS["several"][0]
    name = sample.asked[0].question.split()[-2]
    assert f"The pass key of {name} is {sample.asked[0].answer}." in sample.text


def test_depths_take_turns() -> None:
    depths = (0.0, 25.0, 50.0, 100.0)
    for experiment in _experiments(where=Where(depths=depths)):
        for index in range(8):
            sample = experiment.sample(index)
            assert sample.depth == pytest.approx(depths[index % 4], abs=60 / sample.places)
            share = sample.text.index(sample.asked[0].sentence) / len(sample.text)
            assert abs(100 * share - sample.depth) < 40


def test_a_sample_is_the_same_each_time_and_others_differ() -> None:
    for again, experiment in zip(_experiments(seed=3), _experiments(seed=3), strict=True):
        assert [again.sample(i) for i in (2, 0)] == [experiment.sample(i) for i in (2, 0)]
        drawn = [experiment.sample(index) for index in range(20)]
        assert len({sample.asked[0].answer for sample in drawn}) == 20
        assert len({sample.position for sample in drawn}) > 3
    for one, other in zip(_experiments(seed=3), _experiments(seed=4), strict=True):
        assert one.sample(0) != other.sample(0)


def test_a_stretch_is_of_the_text_and_of_the_length_asked_for() -> None:
    text = topic_text()
    starts = set()
    for index in range(20):
        sample = Needle(HAYSTACK, tokens=600).sample(index)
        fact = sample.asked[0].sentence
        before, after = sample.text.split(fact)
        assert before + after in text
        assert 300 < count(before + after) <= 600
        starts.add(text.index(before + after))
    assert len(starts) == 20


def test_no_stretch_ends_before_what_is_too_long_for_it() -> None:
    short, table = "A short one here.", "A table of " + 400 * "many rows and " + "an end."
    haystack = Haystack.of(" ".join([*[*[short] * 40, table] * 5, *[short] * 40]), count)
    for index in range(40):
        sample = Needle(haystack, tokens=100).sample(index)
        assert count(sample.text) >= 75


def test_the_whole_text_may_be_the_stretch_and_no_more() -> None:
    haystack = Haystack.of("One here. Two here. Three here.", count)
    whole = sum(haystack.tokens)
    sample = Needle(haystack, tokens=whole).sample(0)
    assert sample.text.replace(sample.asked[0].sentence, "") == "One here. Two here. Three here."
    with pytest.raises(InvalidArgument, match="ask for fewer"):
        Needle(haystack, tokens=whole + 1).sample(0)


def test_keys_are_five_digits_or_three_words() -> None:
    for index in range(20):
        number = Passkey(keys="number").sample(index).asked[0].answer
        assert len(number) == 5
        assert 10_000 <= int(number) < 100_000
        words = Passkey(keys="words").sample(index).asked[0].answer.split("-")
        assert len(set(words)) == 3
        assert set(words) <= set(WORDS)


def test_there_are_words_enough() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert all(word.isalpha() and word.istitle() for word in WORDS + NAMES)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"junk": 3, "task": "several"}, "found 3 repetitions"),
        ({"junk": 10, "where": Where(10)}, "must be 0 to 9"),
        ({"task": "third"}, "expected one of single, several, second; found 'third'"),
        ({"keys": "letters"}, "found 'letters'"),
    ],
)
def test_what_cannot_be_hidden_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Passkey(**settings)


def test_a_depth_outside_the_text_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="found 101"):
        Where(depths=(0, 101))


def test_a_question_goes_on_where_the_text_ends() -> None:
    """Tokens of the text and of the question are those of both in one."""
    encode = small_model().text.encode
    sample = Passkey(junk=5).sample(0)
    question = sample.asked[0].question
    assert encode(sample.text) + encode(question) == encode(sample.text + question)
