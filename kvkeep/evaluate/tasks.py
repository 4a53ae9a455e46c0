"""Tasks: facts hidden in a real text and asked for, as in RULER (arXiv:2404.06654) and more."""

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Protocol

from kvkeep.evaluate.samples import KEY_TYPES, Fact, random_key
from kvkeep.evaluate.words import CODE_WORDS, FACTS, LISTS, NAMES, WORDS

COUNT_NAMES = {2: "two", 3: "three", 4: "four"}
WORDS_PER_SENTENCE = 5  # of `WordCountTask`
VARIABLE_LENGTH = 3  # letters of a variable's name


@dataclass(frozen=True)
class TaskInstance:
    """The hidden sentences and the questions of one sample."""

    sentences: tuple[str, ...]  # for separate positions; each begins with a space
    facts: tuple[Fact, ...]  # asked for separately
    ordered: bool = False  # the sentences keep this order in the text


class Task(Protocol):
    @property
    def key_types(self) -> tuple[str, ...]:
        """The supported key types, the default first."""

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        """Return an instance that depends only on `random` and the key type."""


@dataclass(frozen=True)
class NeedleTask:
    """Hides one fact about each of `hidden` people, and asks for the first `asked` of them."""

    hidden: int
    asked: int
    same_subject: bool = False  # only the names tell the facts apart
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        names = random.sample(NAMES, self.hidden)
        subjects = random.sample(FACTS["subjects"][key_type], self.hidden)
        if self.same_subject:
            subjects = subjects[:1] * self.hidden
        template = random.choice(FACTS["facts"])
        facts = []
        for name, subject in zip(names, subjects, strict=True):
            key = random_key(key_type, random)
            texts = {"name": name, "subject": subject, "key": key}
            sentence = f" {template['sentence'].format(**texts)}"
            facts.append(Fact(sentence, f"\n\n{template['question'].format(**texts)}", key))
        return TaskInstance(tuple(fact.sentence for fact in facts), tuple(facts[: self.asked]))


@dataclass(frozen=True)
class MultiValueTask:
    """Hides several keys of one person, and asks for the one missing in the question."""

    values: int
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        name, subject = random.choice(NAMES), random.choice(FACTS["subjects"][key_type])
        keys = [random_key(key_type, random) for _ in range(self.values)]
        sentences = tuple(f" One of the {subject}s of {name} is {key}." for key in keys)
        answer, *named = keys
        subjects = f"{COUNT_NAMES[self.values]} {subject}s of {name}"
        question = f"\n\nWhat are the {subjects}? The {subjects} are {', '.join(named)} and"
        return TaskInstance(sentences, (Fact(sentences[0], question, answer),))


@dataclass(frozen=True)
class VariableTrackingTask:
    """Hides a chain of assignments, and asks for the value of each variable."""

    hops: int  # from the first variable to the last
    key_types: tuple[str, ...] = KEY_TYPES

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        initials = random.sample(ascii_uppercase, self.hops + 1)
        names = [
            initial + "".join(random.choices(ascii_uppercase, k=VARIABLE_LENGTH - 1))
            for initial in initials
        ]
        values = [random_key(key_type, random), *names[:-1]]
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
    label: str  # what one word is called
    top: int = 3
    key_types: tuple[str, ...] = ("words",)

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        drawn = random.sample(self.words, len(self.counts))
        occurrences = [
            word for word, count in zip(drawn, self.counts, strict=True) for _ in range(count)
        ]
        random.shuffle(occurrences)
        sentences = tuple(
            f" {self.label.capitalize()}s: "
            f"{', '.join(occurrences[start : start + WORDS_PER_SENTENCE])}."
            for start in range(0, len(occurrences), WORDS_PER_SENTENCE)
        )
        answer, *named = random.sample(drawn[: self.top], self.top)
        sentence = next(sentence for sentence in sentences if answer in sentence)
        question = (
            f"\n\nWhich {COUNT_NAMES[self.top]} {self.label}s were said most often? "
            f"The {COUNT_NAMES[self.top]} most frequent {self.label}s are {', '.join(named)} and"
        )
        return TaskInstance(sentences, (Fact(sentence, question, answer),))


@dataclass(frozen=True)
class RewordedTask:
    """Hides one fact about one person, and asks for it in words that the text does not use."""

    key_types: tuple[str, ...] = ("words",)

    def generate(self, random: Random, key_type: str) -> TaskInstance:
        name, template = random.choice(NAMES), random.choice(FACTS["reworded"])
        answer = random.choice(LISTS[template["answers"]])
        sentence = f" {template['sentence'].format(name=name, answer=answer)}"
        fact = Fact(sentence, f"\n\n{template['question'].format(name=name)}", answer)
        return TaskInstance((sentence,), (fact,))


TASKS: dict[str, Task] = {
    "single": NeedleTask(hidden=1, asked=1),
    "several": NeedleTask(hidden=4, asked=1, same_subject=True),  # RULER's multi-key
    "second": NeedleTask(hidden=2, asked=2),
    "multivalue": MultiValueTask(values=3),
    "multiquery": NeedleTask(hidden=4, asked=4),
    "variables": VariableTrackingTask(hops=2),
    "common": WordCountTask(WORDS, counts=(5, 5, 5, *[1] * 10), label="word"),
    "frequent": WordCountTask(CODE_WORDS, counts=(12, 8, 6, 2, 1, 1), label="code word"),
    "reworded": RewordedTask(),
}
