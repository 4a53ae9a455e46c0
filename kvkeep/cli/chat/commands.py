"""Commands at the chat's prompt: each is a row of `COMMANDS` and a method of `ChatCommands`."""

import difflib
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NoReturn

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.file_paths import split_path
from kvkeep.cli.chat.passages import Passage, find_passage, split_reference
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.memory_map import memory_map
from kvkeep.cli.output import plural
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

_MAX_DIGITS = 18  # of a number of tokens
_QUOTED_TEXT = re.compile(r'"([^"]*)"', re.DOTALL)
_HELP_PASSAGES = """\
WHAT is a turn's number (3), a part of it (3.question, 3.answer), last, system, or "quoted words".
With --session NAME, the branch that is current is saved under it, the others as NAME-BRANCH."""
_HELP_KEYS = """\
Alt-Enter starts a new line, and so does Enter within three quotes (\"\"\"). Tab completes. Ctrl-C
stops an answer or clears the line; Ctrl-D ends the chat."""

_QUIT = ("/quit", "end the chat, as Ctrl-D and /exit do")
# By name: the usage and the meaning, as help shows them. `ChatCommands.do_NAME` runs a command.
COMMANDS: dict[str, tuple[str, str]] = {
    "/help": ("/help", "list these commands"),
    "/file": ("/file PATH [TEXT]", "send the contents of a file, followed by TEXT"),
    "/regenerate": ("/regenerate", "generate the last answer again"),
    "/clear": ("/clear", "remove all turns; the system prompt stays"),
    "/save": ("/save [NAME]", "save the chat now; with NAME, under that name from now on"),
    "/set": ("/set [NAME VALUE]", "show or change settings: temperature, markdown..."),
    "/memory": ("/memory", "show which tokens the KV cache holds, and its size"),
    "/pin": ("/pin WHAT", "keep it in the cache for good"),
    "/unpin": ("/unpin WHAT", "let it be evicted again"),
    "/forget": ("/forget WHAT", "remove it from the cache now"),
    "/edit": (
        "/edit WHAT NEW TEXT",
        "replace it in place; with --exact before WHAT, re-evaluate what follows",
    ),
    "/undo": ("/undo", "remove the last turn, if its cells are still held"),
    "/compact": (
        "/compact [TARGET]",
        "shrink what is old to so many cells (or a part of all: 0.5)",
    ),
    "/keep": ("/keep N", "never evict the first N tokens"),
    "/branch": ("/branch [NAME]", "continue in a copy, which shares its cells"),
    "/branches": ("/branches", "list branches"),
    "/switch": ("/switch NAME", "continue in another branch"),
    **dict.fromkeys(("/quit", "/exit", "/bye"), _QUIT),
}


class LeaveChat(Exception):
    """Raised by commands that end the chat."""


def is_command(message: str) -> bool:
    """Whether the input is a command. Several lines are a message, and so is a path."""
    line = message.strip()
    if not line.startswith("/") or "\n" in line:
        return False
    word = line.split()[0]
    return word in COMMANDS or word == "/" or not ("/" in word[1:] or _exists(word))


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a null byte in the path
        return False


class ChatCommands(ABC):
    """The commands of a chat.

    A method `do_NAME` takes the words after the command's name, and returns a message for the user
    or "". It raises KvkeepError only before it changes anything.
    """

    is_interactive: bool  # whether messages come from a terminal

    def __init__(self, branches: Branches, settings: ChatSettings):
        self.branches, self.settings = branches, settings

    @abstractmethod
    def ask(self, message: str, line: str | None = None) -> None:
        """Run a turn with a question. line: what the user typed for it; None: the question."""

    @abstractmethod
    def compact(self, target: float) -> str:
        """Compact the session as `Session.compact`; return what was done and freed, in words."""

    def run_command(self, line: str) -> str:
        """Run a command; return the message for the user. Raises LeaveChat to end the chat."""
        name, *rest = line.split(maxsplit=1)
        if name in COMMANDS:
            return str(getattr(self, f"do_{name[1:]}")("".join(rest).strip()))
        similar = difflib.get_close_matches(name, COMMANDS, 1)
        suggestion = f"did you mean {similar[0]}? " if similar else ""
        raise InvalidArgument(f"there is no command {name}; {suggestion}/help lists them")

    def do_help(self, argument: str) -> str:
        unique_entries = dict.fromkeys(COMMANDS.values())  # aliases share an entry
        rows = [f"  {usage:<21}  {meaning}" for usage, meaning in unique_entries]
        return "\n".join([*rows, _HELP_PASSAGES, *([_HELP_KEYS] if self.is_interactive else [])])

    def do_file(self, argument: str) -> str:
        parts = split_path(argument)
        if parts is None or "\0" in parts[0]:
            raise InvalidArgument(
                "/file needs the path of a text file, and optionally a question about it"
            )
        path, question = Path(os.path.expanduser(parts[0])), parts[1]
        try:
            text = read_text_file(path)
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
        if not text.strip():
            raise InvalidArgument(f"{path} is empty")
        self.ask(f"{text.rstrip()}\n\n{question}" if question else text, line=f"/file {argument}")
        return ""

    def do_clear(self, argument: str) -> str:
        session = self.branches.current.session
        session.rewind(len(session.tokens))
        return "all turns are removed"

    def do_set(self, argument: str) -> str:
        name, *value = argument.split(maxsplit=1) or [""]
        if not name:
            return "\n".join(self.settings.lines())
        self.settings.set(name, "".join(value).strip())
        return next(line.strip() for line in self.settings.lines() if line.split()[0] == name)

    def do_memory(self, argument: str) -> str:
        return memory_map(self.branches.current.session)

    def do_pin(self, argument: str) -> str:
        passage = find_passage(self.branches.current, argument)
        self.branches.current.session.pin(passage.start, passage.end)
        return f"{passage.description} is pinned: {plural(passage.token_count, 'token')}"

    def do_unpin(self, argument: str) -> str:
        passage = find_passage(self.branches.current, argument)
        self.branches.current.session.unpin(passage.start, passage.end)
        return f"{passage.description} is unpinned"

    def do_forget(self, argument: str) -> str:
        conversation = self.branches.current
        session, passage = conversation.session, find_passage(conversation, argument)
        remaining_text = passage.replaced_text("") if passage.quote else ""
        old_count = len(session.tokens)
        if remaining_text.strip():
            session.replace(passage.start, passage.end, remaining_text)
        else:
            session.delete(passage.start, passage.end)
        self._update_system(passage)
        removed_tokens = plural(old_count - len(session.tokens), "token")
        return f"{passage.description} is removed: {removed_tokens}"

    def do_edit(self, argument: str) -> str:
        reference, text = split_reference(argument)
        exact = reference == "--exact"
        if exact:
            reference, text = split_reference(text)
        if quoted := _QUOTED_TEXT.fullmatch(text):
            text = quoted[1]
        if not text:
            raise InvalidArgument("/edit needs a passage and its new text; see /help")
        session = self.branches.current.session
        passage = find_passage(self.branches.current, reference, text_only=True)
        old_count, new_text = len(session.tokens), passage.replaced_text(text)
        start, end = passage.start, passage.end
        report = session.replace(start, end, new_text, recompute="suffix" if exact else "none")
        self._update_system(passage)
        new_count = plural(passage.token_count + len(session.tokens) - old_count, "token")
        return (
            f"{passage.description} is replaced: {new_count} instead of {passage.token_count}, "
            f"{report.tokens_evaluated} evaluated in {report.seconds:.2f} s"
        )

    def _update_system(self, passage: Passage) -> None:
        """Store an edited system prompt, which a later `--system` must equal."""
        if passage.description.endswith("the system prompt"):
            conversation = self.branches.current
            start, end = conversation.session.span_ranges.get("system text", (0, 0))
            text = conversation.codec.decode(conversation.session.tokens[start:end])
            conversation.system = text or None

    def do_undo(self, argument: str) -> str:
        count = self.branches.current.undo()
        remaining = plural(len(self.branches.current.turns), "turn")
        return f"removed {plural(count, 'token')}; {remaining} left"

    def do_compact(self, argument: str) -> str:
        try:
            target = float(argument or 0.5)
        except ValueError:
            target = 0.0
        if not 0 < target < 2**40:
            raise InvalidArgument(
                "/compact needs a number of cells, or a part of all such as 0.5; found "
                f"{argument!r:.100}"
            )
        return self.compact(target if target < 1 else int(target))

    def do_keep(self, argument: str) -> str:
        if not argument.isdecimal() or len(argument) > _MAX_DIGITS:
            raise InvalidArgument(f"/keep needs a number of tokens; found {argument!r:.100}")
        self.branches.current.session.keep = int(argument)
        return f"the first {plural(int(argument), 'token')} are never evicted"

    def do_branch(self, argument: str) -> str:
        self.branches.create(argument)
        return f"now on branch {self.branches.current_name}; /switch changes it"

    def do_branches(self, argument: str) -> str:
        return "\n".join(self.branches.lines())

    def do_switch(self, argument: str) -> str:
        self.branches.switch(argument)
        turns = plural(len(self.branches.current.turns), "turn")
        return f"now on branch {self.branches.current_name}, {turns}"

    def do_quit(self, argument: str) -> NoReturn:
        raise LeaveChat

    do_exit = do_bye = do_quit
