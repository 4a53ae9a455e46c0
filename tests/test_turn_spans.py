"""Spans of a chat's texts are these texts, whatever white space they begin or end with."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvkeep import Session, load_model
from kvkeep.chat.messages import ReasoningPart
from kvkeep.chat.output import Output, joined_output
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.conversation import Conversation
from kvkeep.session.rendering import encode_pieces
from kvkeep.session.session import GREEDY
from kvkeep.session.turn_template import count_system_tokens
from tests.models.chat_templates import GEMMA, GEMMA2, LLAMA3, MISTRAL
from tests.models.test_gguf_sentencepiece import LIKE_GEMMA, LIKE_LLAMA2, train
from tests.scripted_model import ScriptedConstraint, family_model

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
PLAIN = """\
{% for m in messages %}{{ '### ' + m['role'] + '\\n' + m['content'] + '\\n\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}
"""


def special(template: str) -> str:
    """With control tokens of the default model, where it has other families' as plain text."""
    for theirs in ("<|start|>", "<start_of_turn>"):
        template = template.replace(theirs, "<|im_start|>")
    for theirs in ("<|stop|>", "<end_of_turn>"):
        template = template.replace(theirs, "<|im_end|>")
    return template


# The template, and whether it strips what is said.
TEMPLATES: dict[str, tuple[str | None, bool]] = {
    "smollm2": (None, False),
    "chatml": (CHATML, False),
    "plain": (PLAIN, False),
    "llama3": (special(LLAMA3), True),
    "llama3, without control tokens": (LLAMA3, True),
    "gemma": (special(GEMMA), True),
    "mistral": (MISTRAL, False),
}
PARTS = (
    *("\n", "\n\n", " ", "  ", "\t", "\r\n", "\ufeff", "\u00a0", "\n ", " \n"),
    *("Hi", "why", "user\n", "assistant\n", "<|im_end|>", "!", "...", "1", "🎉", "[/INST]", "é"),
)
ODD = ("\n\nHi", "  leading", "Hi \n", " ", "\n", "\r\nHi\r\n", "Hi!", "kvkeepanswer", "### user\n")


@pytest.fixture(scope="module", params=TEMPLATES)
def chat(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, str, bool]:
    name = request.param
    template, strips = TEMPLATES[name]
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("model") / "m")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_model(str(folder), dtype="float32"), name, strips


def drawn(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return chance.choice(ODD)
    return "".join(chance.choices(PARTS, k=chance.randint(1, 5)))


def talked(model: Model, system: str | None, questions: list[str], answer: str) -> Session:
    session = model.session(2048)
    conversation = Conversation(session, model.text, model.end_token_ids, system)
    for question in questions:
        ids = conversation.begin_turn(question)
        session.feed(ids)
        conversation.name_turn(question, len(ids))
        session.feed(answer)
        conversation.end_turn()
    return session


def said_in(session: Session, model: Model, name: str) -> str:
    start, end = session.span_ranges.get(name, (0, 0))
    return model.text.decode(session.tokens[start:end])


def test_spans_are_what_was_said_and_can_be_replaced(chat: tuple[Model, str, bool]) -> None:
    """Replacing one by its name gives the tokens of a chat in which that was said."""
    (model, name, strips), chance = chat, random.Random(7)
    answer = " Fine" if name == "mistral" else "Fine"
    for _ in range(3):
        system = drawn(chance) if chance.random() < 0.5 and name != "mistral" else None
        questions = [drawn(chance) for _ in range(3)]
        session = talked(model, system, questions, answer)
        text = session.text()
        texts = {f"turn {n} question": each for n, each in enumerate(questions, 1)}
        if system is not None and name != "gemma":  # which has it in the first turn
            texts["system text"] = system
            if name != "plain":  # whose "\n\n" is another token before what follows
                assert count_system_tokens(model.text, system) == session.span_ranges["system"][1]
        replaceable = set[str]()
        for span, said in texts.items():
            said = said.strip() if strips else said
            found = said_in(session, model, span)
            # The one exception: after a template's space a word begins with it, as in all texts.
            joined = name == "mistral" and found == f" {said}" and not said[0].isspace()
            assert joined or found == said
            if not said or joined:
                continue
            replaceable.add(span)
            tokens = list(session.tokens)
            session.replace(span, None, said)
            assert session.tokens == tokens
        new = f"\n {drawn(chance)}"
        if not strips and "turn 2 question" in replaceable:
            session.replace("turn 2 question", None, new)
            other = talked(model, system, [questions[0], new, questions[2]], answer)
            assert session.tokens == other.tokens
            assert session.span_ranges == other.span_ranges
            session.replace("turn 2 question", None, questions[1])
        assert session.text() == text


def test_a_text_that_was_fed_between_turns_belongs_to_none(chat: tuple[Model, str, bool]) -> None:
    """So that it stays when the turn before it is deleted."""
    model, _, _ = chat
    session = talked(model, None, ["Hi", "Ho"], "Fine")
    before = session.span_ranges["turn 2"]
    session.feed("fed text")
    conversation = Conversation(session, model.text, model.end_token_ids, None)
    ids = conversation.begin_turn("Hey")
    session.feed(ids)
    conversation.name_turn("Hey", len(ids))
    spans = session.span_ranges
    assert spans["turn 2"] == before
    assert spans["turn 1"][1] == before[0]
    assert "fed text" in model.text.decode(session.tokens[before[1] : spans["turn 3"][0]])


def test_memory_is_what_the_template_renders(chat: tuple[Model, str, bool]) -> None:
    """To the character, and where no token reaches across a border, to the token."""
    (model, name, _), chance = chat, random.Random(8)
    answer = " Fine" if name == "mistral" else "Fine"
    for _ in range(3):
        questions = [drawn(chance) for _ in range(3)]
        session = talked(model, None, questions, answer)
        messages = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": "Fine"})
        last = len(messages) - 1
        rendered = str(model.text.chat(messages[:last])) + answer
        assert session.text() == rendered
    plain = ["Hi there", "Why?", "Really"]
    session = talked(model, None, plain, answer)
    pairs = [("user", each) for each in plain]
    messages = [{"role": role, "content": each} for role, each in pairs[:1]]
    ids = model.text.encode(model.text.chat(messages))
    assert list(session.tokens[: len(ids)]) == ids


@pytest.mark.parametrize("prefix", [True, False], ids=["dummy prefix", "no prefix"])
@pytest.mark.parametrize("before", ["<s>", "<s>[INST] ", "<s>user\n"])
@pytest.mark.parametrize("text", ["Hi", "\n\nHi", "Hi \n", "  Hi", " ", "The value  "])
@pytest.mark.parametrize("after", ["</s>", " [/INST]", "\nassistant\n"])
def test_pieces_are_found_in_sentencepiece(
    vocabularies: Callable[[bool], TextCodec],
    prefix: bool,
    before: str,
    text: str,
    after: str,
) -> None:
    """The tokens decode to the whole, and a text's own to it: no token of the template's."""
    codec = vocabularies(prefix)
    pieces = [codec._control_tokens._seal(each) for each in (before, text, after)]
    ids, places = encode_pieces(codec, pieces)
    assert codec.decode(ids) == codec.decode(codec.encode_sealed("".join(pieces)))
    assert [place[0] for place in places[1:]] == [place[1] for place in places[:-1]]
    assert (places[0][0], places[-1][1]) == (0, len(ids))
    found = codec.decode_continuation(ids[slice(*places[1])])
    # A space of the template's, or the tokenizer's own, opens the text's first token; and where
    # white space is one token with the template's, it stays with the template.
    allowed = {text, f" {text}"} if prefix or before.endswith(" ") else {text}
    assert found in allowed or (prefix and text.startswith(found.removeprefix(" ")))


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], TextCodec]:
    """As Llama 2 has it, with a dummy prefix, and as Gemma, without."""
    made = {}
    for prefix, how in ((True, LIKE_LLAMA2), (False, LIKE_GEMMA)):
        folder = tmp_path_factory.mktemp("vocabulary")
        tokenizer = train(**how).from_gguf(folder / "m.gguf", add_space_prefix=prefix)
        tokenizer.save(str(folder / "tokenizer.json"))
        made[prefix] = TextCodec.open(folder)
    return made.__getitem__


@pytest.mark.parametrize("answer", ["Fine", ""])
def test_an_answer_that_was_rewound_begins_anew(chat: tuple[Model, str, bool], answer: str) -> None:
    """Whatever was asked: its place is where it was. An end token alone is an answer, too."""
    (model, _, _), chance = chat, random.Random(9)
    for _ in range(6):
        session = talked(model, None, [drawn(chance), drawn(chance)], "Fine")
        conversation = Conversation(session, model.text, model.end_token_ids, None)
        session.feed(ids := conversation.begin_turn(question := drawn(chance)))
        conversation.name_turn(question, len(ids))
        tokens, spans = list(session.tokens), session.span_ranges
        session.feed([*model.text.encode(answer), *model.end_token_ids[:1]])
        conversation.end_turn()
        if answer:
            session.rewind(len(session.tokens) - session.span_ranges["turn 3 answer"][0])
        conversation.reopen_turn()
        assert (list(session.tokens), session.span_ranges) == (tokens, spans)


def test_a_template_without_a_system_role_gets_it_in_the_first_turn(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(special(GEMMA2))
    model = load_model(str(folder), dtype="float32")
    session = talked(model, "Be brief.", ["Hi there", "Why?"], "Fine")
    first = {"role": "user", "content": "Be brief.\n\nHi there"}
    answer = {"role": "assistant", "content": "Fine"}
    messages = [first, answer, {"role": "user", "content": "Why?"}]
    assert session.text() == str(model.text.chat(messages)) + "Fine"
    assert said_in(session, model, "turn 1 question") == "Hi there"


def test_what_stays_of_a_message_that_was_cut_off_is_a_turn(chat: tuple[Model, str, bool]) -> None:
    """Only if older tokens were evicted for it; otherwise the session is as it was."""
    (model, _, _), chance = chat, random.Random(8)
    question = "Why is the sea salt, and who found out? " * 6
    for num_before in (0, 1, 2):
        for _ in range(4):
            session = model.session(64, keep=0)
            conversation = Conversation(session, model.text, model.end_token_ids, None)
            for number in range(num_before):
                session.feed(ids := conversation.begin_turn(f"Hi {number}"))
                conversation.name_turn(f"Hi {number}", len(ids))
                session.feed(" Fine")
                conversation.end_turn()
            tokens, spans = list(session.tokens), session.span_ranges
            ids = conversation.begin_turn(question)
            count = chance.randrange(len(ids))
            session.feed(ids[:count]) if count else None
            is_removed = conversation.cancel_turn(question, ids, count)
            assert is_removed == (list(session.tokens) == tokens)
            if is_removed:
                assert session.span_ranges == spans
            else:
                turn = f"turn {num_before + 1}"
                assert list(session.tokens) == tokens + ids[:count]
                assert session.span_ranges[turn][1] == len(session.tokens)
                said = said_in(session, model, f"{turn} question")
                assert said.strip()
                assert question.startswith(said.strip())
                assert f"{turn} answer" not in session.span_ranges
                for answer in (conversation.answer, conversation.reopen_turn):
                    with pytest.raises(InvalidArgument):
                        answer()
            follow_up = conversation.begin_turn("Once more?")
            session.feed(follow_up)
            conversation.name_turn("Once more?", len(follow_up))
            session.feed(" Fine")
            conversation.end_turn()
            last = f"turn {num_before + 2 - is_removed}"
            assert said_in(session, model, f"{last} question").strip() == "Once more?"
            assert said_in(session, model, f"{last} answer").strip() == "Fine"


def test_what_goes_on_in_reasoning_is_reasoning(tmp_path: Path) -> None:
    model = family_model(tmp_path / "m", ["<think>", "</think>"])
    session = model.session(2048)
    conversation = Conversation(session, model.text, model.end_token_ids, None)
    session.feed(ids := conversation.begin_turn("Why?"))
    conversation.name_turn("Why?", len(ids))
    session.feed(model.text.encode("<think>Hm", special=True))
    conversation.end_turn()
    conversation.reopen_turn()
    constraint = ScriptedConstraint(model.text.encode(", so", special=True), None)
    events = list(conversation.read_answer(4, replace(GREEDY, constraint=constraint)))
    assert joined_output(events) == Output((ReasoningPart(", so"),))
