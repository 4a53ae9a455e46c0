"""Tasks: facts hidden in a real text and asked for, as in RULER (arXiv:2404.06654) and more."""

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Protocol

from kvkeep.evaluate.samples import KEY_TYPES, Fact, random_key
from kvkeep.evaluate.words import CODE_WORDS, FACTS_TOML, NAMES, WORD_LISTS, WORDS

NUMBER_WORDS = {2: "two", 3: "three", 4: "four"}
WORDS_PER_SENTENCE = 5  # of `WordCountTask`
VARIABLE_LENGTH = 3  # letters of a variable's name


@dataclass(frozen=True)
class TaskInstance:
    """The hidden sentences and the questions of one sample."""

    sentences: tuple[str, ...]  # for separate positions; each begins with a space
    facts: tuple[Fact, ...]  # asked for separately
    ordered: bool = False  # the sentences keep this order in the text


class Task(Protocol):
    """A kind of question, with the sentences to hide for it."""

    @property
    def key_types(self) -> tuple[str, ...]:
        """The supported key types, the default first."""

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        """Return an instance that depends only on `rng` and the key type."""


@dataclass(frozen=True)
class NeedleTask:
    """Hides one fact about each of some people, and asks for the first ones."""

    hidden_count: int
    asked_count: int
    same_subject: bool = False  # only the names tell the facts apart
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        names = rng.sample(NAMES, self.hidden_count)
        subjects = rng.sample(FACTS_TOML["subjects"][key_type], self.hidden_count)
        if self.same_subject:
            subjects = subjects[:1] * self.hidden_count
        template = rng.choice(FACTS_TOML["facts"])
        facts = []
        for name, subject in zip(names, subjects, strict=True):
            key = random_key(key_type, rng)
            fields = {"name": name, "subject": subject, "key": key}
            sentence = f" {template['sentence'].format(**fields)}"
            facts.append(Fact(sentence, f"\n\n{template['question'].format(**fields)}", key))
        sentences = tuple(fact.sentence for fact in facts)
        return TaskInstance(sentences, tuple(facts[: self.asked_count]))


@dataclass(frozen=True)
class MultiValueTask:
    """Hides several keys of one person, and asks for the one missing in the question."""

    value_count: int
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        name, subject = rng.choice(NAMES), rng.choice(FACTS_TOML["subjects"][key_type])
        keys = [random_key(key_type, rng) for _ in range(self.value_count)]
        sentences = tuple(f" One of the {subject}s of {name} is {key}." for key in keys)
        answer, *named_keys = keys
        phrase = f"{NUMBER_WORDS[self.value_count]} {subject}s of {name}"
        question = f"\n\nWhat are the {phrase}? The {phrase} are {', '.join(named_keys)} and"
        return TaskInstance(sentences, (Fact(sentences[0], question, answer),))


@dataclass(frozen=True)
class VariableTrackingTask:
    """Hides a chain of assignments, and asks for the value of each variable."""

    hops: int  # from the first variable to the last
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        initials = rng.sample(ascii_uppercase, self.hops + 1)
        names = [
            initial + "".join(rng.choices(ascii_uppercase, k=VARIABLE_LENGTH - 1))
            for initial in initials
        ]
        values = [random_key(key_type, rng), *names[:-1]]
        question = "\n\nWhat is the value of each variable? VAR {name} ="
        facts = tuple(
            Fact(f" VAR {name} = {value}.", question.format(name=name), value)
            for name, value in zip(names, values, strict=True)
        )
        return TaskInstance(tuple(fact.sentence for fact in facts), facts, ordered=True)


@dataclass(frozen=True)
class WordCountTask:
    """Hides words in random order, and asks for the most frequent one missing in the question."""

    words: tuple[str, ...]  # to draw from
    counts: tuple[int, ...]  # occurrences of each drawn word, in descending order
    word_noun: str  # what one of the words is called
    top_count: int = 3
    key_types: tuple[str, ...] = ("words",)

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        drawn_words = rng.sample(self.words, len(self.counts))
        occurrences = [
            word for word, count in zip(drawn_words, self.counts, strict=True) for _ in range(count)
        ]
        rng.shuffle(occurrences)
        sentences = tuple(
            f" {self.word_noun.capitalize()}s: "
            f"{', '.join(occurrences[start : start + WORDS_PER_SENTENCE])}."
            for start in range(0, len(occurrences), WORDS_PER_SENTENCE)
        )
        answer, *named_words = rng.sample(drawn_words[: self.top_count], self.top_count)
        sentence = next(sentence for sentence in sentences if answer in sentence)
        count_word, plural_noun = NUMBER_WORDS[self.top_count], f"{self.word_noun}s"
        question = (
            f"\n\nWhich {count_word} {plural_noun} were said most often? "
            f"The {count_word} most frequent {plural_noun} are {', '.join(named_words)} and"
        )
        return TaskInstance(sentences, (Fact(sentence, question, answer),))


@dataclass(frozen=True)
class RewordedTask:
    """Hides one fact about one person, and asks for it in words that the text does not use."""

    key_types: tuple[str, ...] = ("words",)

    def generate(self, rng: Random, key_type: str) -> TaskInstance:
        name, template = rng.choice(NAMES), rng.choice(FACTS_TOML["reworded"])
        answer = rng.choice(WORD_LISTS[template["answers"]])
        sentence = f" {template['sentence'].format(name=name, answer=answer)}"
        fact = Fact(sentence, f"\n\n{template['question'].format(name=name)}", answer)
        return TaskInstance((sentence,), (fact,))


TASKS: dict[str, Task] = {
    "single": NeedleTask(hidden_count=1, asked_count=1),
    "several": NeedleTask(hidden_count=4, asked_count=1, same_subject=True),  # RULER's multi-key
    "second": NeedleTask(hidden_count=2, asked_count=2),
    "multivalue": MultiValueTask(value_count=3),
    "multiquery": NeedleTask(hidden_count=4, asked_count=4),
    "variables": VariableTrackingTask(hops=2),
    "common": WordCountTask(WORDS, counts=(5, 5, 5, *[1] * 10), word_noun="word"),
    "frequent": WordCountTask(CODE_WORDS, counts=(12, 8, 6, 2, 1, 1), word_noun="code word"),
    "reworded": RewordedTask(),
}
# The answer is in several hidden sentences, so that a sample has no depth of the asked fact.
SCATTERED_TASKS = tuple(name for name, task in TASKS.items() if isinstance(task, WordCountTask))
