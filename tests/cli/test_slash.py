"""Chat commands change memory in place; a refused one changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import run_on_branches

from kvkeep import load_model
from kvkeep.cache import RaggedCells
from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import is_command
from kvkeep.cli.memory_map import draw_bar, memory_map
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.model import Model
from kvkeep.session.conversation import Conversation

SYSTEM = "You speak of roses."
TURNS = [
    ("Which rose is red?", "The Gallica is."),
    ("Is it old?", "Yes."),
    ("Who grew it?", "Eve."),
]

Do = Callable[[str], str]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return load_model(str(tiny_folder), dtype="float32")


def _begun(model: Model, system: str | None = SYSTEM, budget: int = 256, **how) -> Branches:
    eos = tuple(model.text.encode("<|im_end|>", special=True))
    conversation = Conversation(model.session(budget, **how), model.text, eos, system)
    for question, answer in TURNS:
        _say(conversation, question, answer)
    return Branches(conversation)


def _say(conversation: Conversation, question: str, answer: str) -> None:
    ids = conversation.begin_turn(question)
    conversation.session.feed(ids)
    conversation.name_turn(question, len(ids))
    conversation.session.feed(answer + "<|im_end|>", special=True)
    conversation.end_turn()


@pytest.fixture
def branches(model: Model) -> Branches:
    return _begun(model)


@pytest.fixture
def do(branches: Branches) -> Do:
    return lambda line: run_on_branches(line, branches)


def _rendered(model: Model, turns, system: str | None = SYSTEM) -> str:
    """The rendered text of these turns, up to the end token of the last answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return model.text.chat(messages, add_generation_prompt=False).removesuffix("\n")


def _pinned(branches: Branches) -> str:
    session = branches.current.session
    pairs = zip(session.tokens, session.token_status, strict=True)
    return branches.current.codec.decode([t for t, standing in pairs if standing == "pinned"])


@pytest.mark.parametrize(
    ("what", "pinned"),
    [
        ("2", "<|im_start|>user\nIs it old?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"),
        ("last.question", "Who grew it?"),
        ("1.answer", "The Gallica is."),
        ('"Gallica"', " Gallica"),
        ('"rose is"', " rose is"),
    ],
)
def test_pinned_passages_are_never_evicted(branches: Branches, do: Do, what, pinned) -> None:
    assert "is pinned" in do(f"/pin {what}")
    assert _pinned(branches) == pinned
    branches.current.session.feed("and so on " * 200)
    assert _pinned(branches) == pinned
    assert "is unpinned" in do(f"/unpin {what}")
    assert _pinned(branches) == ""


def test_pinned_passages_can_be_edited_and_forgotten(branches: Branches, do: Do) -> None:
    """The template's tokens around a question are evicted as usual."""
    do("/pin 1.question")
    branches.current.session.feed("and so on " * 200)
    assert "is replaced" in do("/edit 1.question Which rose is white?")
    assert _pinned(branches) == "Which rose is white?"
    branches.current.session.feed("and so on " * 20)
    assert "is removed" in do("/forget 1.question")
    assert _pinned(branches) == ""


def test_all_of_the_system_prompt_is_pinned(model: Model) -> None:
    branches = _begun(model, keep=0)
    run_on_branches("/pin system", branches)
    assert _pinned(branches) == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"


@pytest.mark.parametrize("exact", ["", "--exact "])
@pytest.mark.parametrize("system", [SYSTEM, None])
def test_an_edited_history_equals_the_rendered_template(model: Model, exact: str, system) -> None:
    branches = _begun(model, system)
    for line in ("1 Which rose is white?", '2.answer "No, it is new."', '"Eve" Adam'):
        run_on_branches(f"/edit {exact}{line}", branches)
    turns = [("Which rose is white?", TURNS[0][1]), (TURNS[1][0], "No, it is new.")]
    turns.append((TURNS[2][0], "Adam."))
    assert branches.current.session.text() == _rendered(model, turns, system)
    _say(branches.current, "And then?", "Nothing.")
    turns.append(("And then?", "Nothing."))
    assert branches.current.session.text() == _rendered(model, turns, system)
    run_on_branches("/undo", branches)
    run_on_branches("/edit last.answer Cain.", branches)
    turns = [*turns[:2], (TURNS[2][0], "Cain.")]
    assert branches.current.session.text() == _rendered(model, turns, system) + "\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [('"Two words"', "Two words"), ('"One" and "two"', '"One" and "two"'), ('"', '"')],
)
def test_quotes_around_a_new_text_are_left_out(branches: Branches, do: Do, text, answer) -> None:
    do(f"/edit 2.answer {text}")
    start, end = branches.current.session.span_ranges["turn 2 answer"]
    content = branches.current.codec.decode(branches.current.session.tokens[start:end])
    assert content.removesuffix("<|im_end|>\n") == answer


def test_an_exact_edit_leaves_the_logits_of_a_new_conversation(branches: Branches, do, model):
    do("/edit --exact 1 Which rose is white?")
    session = model.session(256)
    session.feed(branches.current.session.tokens)
    assert session.logits is not None
    assert (session.logits - branches.current.session.logits).abs().max() < 1e-4


def test_an_edited_system_prompt_outlives_the_turns(model: Model, branches: Branches, do: Do):
    figs = "You speak of figs."
    do(f"/edit system {figs}")
    assert branches.current.notes == {"system": figs}
    for _ in TURNS:
        do("/undo")
    _say(branches.current, "Hm?", "Hm.")
    assert branches.current.session.text() == _rendered(
        model, [("Hm?", "Hm.")], "You speak of figs."
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_forgetting_removes_a_whole_turn(
    model: Model, branches: Branches, do: Do, number: int
) -> None:
    assert f"turn {number} is removed" in do(f"/forget {number}")
    left = [turn for n, turn in enumerate(TURNS, 1) if n != number]
    assert branches.current.turns == [n for n in (1, 2, 3) if n != number]
    assert branches.current.session.text().removesuffix("\n") == _rendered(model, left)
    _say(branches.current, "And then?", "Nothing.")
    assert branches.current.session.text() == _rendered(model, [*left, ("And then?", "Nothing.")])


def test_every_turn_can_be_forgotten(model: Model, branches: Branches, do: Do) -> None:
    for what in ("2", "last", "last", "system"):
        do(f"/forget {what}")
    assert branches.current.turns == []
    assert branches.current.session.cache.cells == 0
    _say(branches.current, "Hm?", "Hm.")
    assert branches.current.session.text() == _rendered(model, [("Hm?", "Hm.")], None)


def test_forgetting_quoted_words_removes_nothing_else(branches: Branches, do: Do) -> None:
    before = branches.current.session.text()
    do('/forget " Gallica"')
    assert branches.current.session.text() == before.replace(" Gallica", "")
    do('/forget "ld"')
    assert "Is it o?" in branches.current.session.text()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/pin", "name a passage; available: system, 1, 2, 3, last"),
        ("/pin 7", "there is no 7; available: system, 1, 2, 3, last"),
        ("/forget rose", "there is no rose"),
        ('/pin "tulip"', 'contains "tulip"'),
        ("/unpin 2", "none of tokens"),
        ("/edit 2", "a passage and its new text"),
        ("/edit", "a passage and its new text"),
        ("/switch b", "no branch 'b'; the branches are main"),
        ("/branch two words", "one word"),
        ("/branch main", "branch main already exists"),
        ("/keep 500", "room for a window"),
        ("/edit 1 " + "long " * 400, "do not fit"),
    ],
)
def test_a_refused_command_changes_nothing(branches: Branches, do: Do, line, why) -> None:
    session, spans = branches.current.session, branches.current.session.spans
    tokens, standing = session.tokens, session.token_status
    with pytest.raises(KvkeepError) as refused:
        do(line)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (session.tokens, session.token_status, session.spans) == (tokens, standing, spans)
    assert branches.current_name == "main"


def test_an_evicted_turn_cannot_be_edited_or_pinned(model: Model) -> None:
    branches = _begun(model, budget=32)
    for line in ("/edit 1 Why?", "/forget 1", "/pin 1"):
        with pytest.raises(InvalidArgument, match="turn 1 is not completely in the cache"):
            run_on_branches(line, branches)


def test_branches_are_independent(model: Model, branches: Branches, do: Do) -> None:
    do("/branch")
    do("/edit 3.answer Noah.")
    do("/branch third")
    do("/undo")
    assert [line.split()[:2] for line in do("/branches").splitlines()] == [
        ["main", "3"],
        ["branch-2", "3"],
        ["*", "third"],
    ]
    do("/switch main")
    assert branches.current.session.text() == _rendered(model, TURNS)
    do("/switch branch-2")
    assert branches.current.session.text() == _rendered(model, [*TURNS[:2], (TURNS[2][0], "Noah.")])
    do("/switch third")
    assert branches.current.turns == [1, 2]


def test_the_memory_map_fits_a_terminal_of_one_column(
    do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert len(do("/memory").splitlines()[0]) == 1


def test_the_memory_map_counts_every_token(model: Model) -> None:
    branches = _begun(model, budget=48)
    run_on_branches("/pin last.question", branches)
    session = branches.current.session
    picture = memory_map(session, width=40, ascii_only=True).splitlines()
    assert len(picture[0]) == 40
    assert set(picture[0]) == set("#P-.")
    counted = {line[2:].split()[0]: int(line.split()[2]) for line in picture[1:-1]}
    assert sum(counted.values()) == len(session.tokens)
    assert sum(counted.values()) - counted["forgotten"] == session.cache.cells
    assert "48 of 48 cells" in picture[-1]
    assert memory_map(session, width=40, ascii_only=False).startswith("█")


def test_the_memory_map_shows_compressed_tokens_and_their_size(model: Model) -> None:
    session = model.session(48, policy="archive", method="keydiff", far_bits="8")
    session.feed("The sea is wide and the night is long. " * 12)
    session.pin(len(session.tokens) - 5, len(session.tokens) - 2)
    picture = memory_map(session, width=40, ascii_only=True).splitlines()
    assert set(picture[0]) == set("#P-:")
    kinds = {line[2:].split()[0]: line.split()[2:] for line in picture[1:-1]}
    assert set(kinds) == {"kept", "pinned", "window", "compressed"}
    assert sum(int(words[0]) for words in kinds.values()) == len(session.tokens)
    assert all(words[-1] == "MB" for words in kinds.values())
    assert "▚" in memory_map(session, width=40, ascii_only=False)


@pytest.mark.parametrize("far_bits", [None, "8"])
def test_the_memory_map_shows_sizes_of_ragged_heads(model: Model, far_bits: Any) -> None:
    session = model.session(48, policy="archive", method="knorm", budget="heads", far_bits=far_bits)
    session.feed("The sea is wide and the night is long. " * 12)
    picture = memory_map(session, width=40, ascii_only=True).splitlines()
    assert set(picture[0]) == set("#-:")
    kinds = {line[2:].split()[0]: line.split()[2:] for line in picture[1:-1]}
    assert set(kinds) == {"kept", "window", "compressed"}
    assert sum(int(words[0]) for words in kinds.values()) == len(session.tokens)
    cells = [s.block.slots for s in session.cache.segments if s.compressed]
    assert all(isinstance(each, RaggedCells) for each in cells)
    held = sum(each.length for each in session.cache.segments)
    assert f"{held} of 48 cells" in picture[-1]
    assert f"({session.cache.nbytes / 1e6:.1f} MB allocated)" in picture[-1]


def test_a_compressed_turn_cannot_be_edited_or_pinned(model: Model) -> None:
    branches = _begun(model, budget=32, policy="archive", method="keydiff")
    for line in ("/edit 1 Why?", "/forget 1", "/pin 1"):
        with pytest.raises(InvalidArgument, match="turn 1 is not completely in the cache"):
            run_on_branches(line, branches)


def test_every_kind_is_visible_in_the_bar() -> None:
    assert draw_bar(["kept"] + ["window"] * 999, 10, 1) == "#---------"
    assert draw_bar(["window"] * 500 + ["pinned"] + ["window"] * 499, 10, 1) == "-----P----"
    assert draw_bar([], 10, 1) == ""
    assert draw_bar(["window"] * 3, 10, 1) == "---"


def test_all_commands_work_from_a_pipe(invoke, tiny) -> None:
    script = "One?\nTwo?\n/pin 1\n/edit 2 Due?\n/branch b\nThree?\n/forget 1\n/memory\n/nope\n"
    script += "/switch main\n/branches\n/undo\n/unpin 1\n/pin 9\nFour?\n/memory\n"
    result = invoke("chat", "-n", 5, "--max-kv-size", 256, "--seed", 1, *tiny, input=script)
    assert result.exit_code == 0
    assert result.stdout.count("\n") >= 4
    assert "* main  2 turns" in result.stderr
    assert "  b     2 turns" in result.stderr
    assert "there is no 9; available: 1, last" in result.stderr
    assert "not saved" not in result.stderr, "nothing was to be saved"


def test_commands_are_told_apart_from_messages(tmp_path: Path) -> None:
    for line in ("/help", "/undo ", "/nope", "/nope a/b", "/", " /pin 1"):
        assert is_command(line), line
    said = ("Hm", "", "//", "/usr/bin/env is what?", f"{tmp_path} is a folder", "/undo\nis done")
    for line in said:
        assert not is_command(line), line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/file ~nosuchuser/a.txt", "~nosuchuser/a.txt cannot be read"),
        ("/file a\0b", "/file needs the path"),
        (f"/keep {'9' * 5000}", "/keep needs a number of tokens"),
        ("/keep 999999999999999999", "keep"),
    ],
    ids=["user", "zero byte", "digits", "large"],
)
def test_paths_and_numbers_that_are_none_are_refused(do: Do, line: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        do(line)
