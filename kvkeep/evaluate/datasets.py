"""Datasets: pass keys in repeated text, facts in real text, and continuations of real text."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.samples import (
    ANYWHERE,
    KEY_TYPES,
    Fact,
    Placement,
    Sample,
    insert_sentences,
    random_key,
    require_choice,
    sample_rng,
)
from kvkeep.evaluate.tasks import TASKS
from kvkeep.evaluate.words import NAMES

PREFIX = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASSKEY_TASKS = {"single": (1, 1), "several": (4, 1), "second": (2, 2)}  # keys hidden, asked for
PASSKEY_SUBJECTS = ("pass key", "door code")  # for the tasks "single" and "second"
CONTINUATION_TOKENS = 512


class Dataset(Protocol):
    """An endless sequence of samples. An index always gives the same sample."""

    def sample(self, sample_index: int) -> Sample: ...


@dataclass(frozen=True)
class PasskeyDataset:
    """Keys among `junk` repetitions of five sentences, as in llama.cpp's example "passkey".

    task: "single" hides one key; "several" hides those of four people and asks for one; "second"
    hides two and asks for both separately.
    """

    junk: int = 250
    key_type: str = "number"
    task: str = "single"
    placement: Placement = ANYWHERE
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice(self.task, PASSKEY_TASKS)
        require_choice(self.key_type, KEY_TYPES)
        if self.junk < self._key_count:
            raise InvalidArgument(
                f"task {self.task!r} needs a separate position for each of {self._key_count} keys; "
                f"found {self.junk} repetitions"
            )
        position = self.placement.position
        if position is not None and not 0 <= position < self.junk:
            raise InvalidArgument(
                f"a key's position must be 0 to {self.junk - 1} (it is put before one of "
                f"{self.junk} repetitions); found {position}"
            )

    def sample(self, sample_index: int) -> Sample:
        rng = sample_rng(self.seed, sample_index)
        subjects = PASSKEY_SUBJECTS[: self._key_count]
        if self.task == "several":
            subjects = tuple(f"pass key of {name}" for name in rng.sample(NAMES, self._key_count))
        facts = [_passkey_fact(subject, random_key(self.key_type, rng)) for subject in subjects]
        positions = self.placement.draw(sample_index, self.junk, len(facts), rng)
        sentences = [fact.sentence for fact in facts]
        _, asked_count = PASSKEY_TASKS[self.task]
        sample = insert_sentences([JUNK] * self.junk, sentences, positions, facts[:asked_count])
        return dataclasses.replace(sample, text=PREFIX + sample.text)

    @property
    def _key_count(self) -> int:
        return PASSKEY_TASKS[self.task][0]


def _passkey_fact(subject: str, key: str) -> Fact:
    return Fact(
        f" The {subject} is {key}. Remember it. {key} is the {subject}.",
        f" What is the {subject}? The {subject} is",
        key,
    )


@dataclass(frozen=True)
class NeedleDataset:
    """Facts such as "The lucky number of Emma is 52163." in passages of a real text.

    passage_tokens: approximate length. task: of `TASKS`. key_type: None for its default.
    """

    haystack: Haystack
    passage_tokens: int = 4000
    key_type: str | None = None
    task: str = "single"
    placement: Placement = ANYWHERE
    seed: int = 0

    def __post_init__(self) -> None:
        task_key_type(self.task, self.key_type)

    def sample(self, sample_index: int) -> Sample:
        rng = sample_rng(self.seed, sample_index)
        key_type = task_key_type(self.task, self.key_type)
        instance = TASKS[self.task].generate(rng, key_type)
        sentence_count = len(instance.sentences)
        passage = self.haystack.passage(self.passage_tokens, max(2, sentence_count), rng)
        draw = self.placement.draw_ascending if instance.ordered else self.placement.draw
        positions = draw(sample_index, len(passage), sentence_count, rng)
        return insert_sentences(passage, instance.sentences, positions, instance.facts)


def task_key_type(task: str, key_type: str | None) -> str:
    """Return the key type, or the task's default for None. Raises InvalidArgument."""
    require_choice(task, TASKS)
    if key_type is None:
        return TASKS[task].key_types[0]
    require_choice(key_type, TASKS[task].key_types)
    return key_type


@dataclass(frozen=True)
class ContinuationDataset:
    """Passages of a real text whose last `CONTINUATION_TOKENS` tokens are scored."""

    haystack: Haystack
    passage_tokens: int = 4000  # approximate length of a passage without its continuation
    seed: int = 0

    def sample(self, sample_index: int) -> Sample:
        rng = sample_rng(self.seed, sample_index)
        num_tokens = self.passage_tokens + CONTINUATION_TOKENS
        sentences = self.haystack.passage(num_tokens, min_sentences=2, rng=rng)
        return Sample(
            "".join(sentences),
            facts=(),
            position=0,
            position_count=len(sentences),
            continuation_tokens=CONTINUATION_TOKENS,
        )
