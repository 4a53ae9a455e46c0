"""`kvkeep generate`: continue a text."""

import select
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli import memory, options
from kvkeep.cli.lazy import OptionsOnlyCommand
from kvkeep.cli.output import say
from kvkeep.cli.session_file import (
    FIRST_PROMPT_KEY,
    UNREAD_KEY,
    OpenedSession,
    SessionWriter,
    apply_keep,
    resume,
)
from kvkeep.cli.store import complete_sessions, open_session_store
from kvkeep.errors import InvalidArgument
from kvkeep.storage.snapshots.header import check_output_path

if TYPE_CHECKING:
    from kvkeep.cli.run import SessionRun
    from kvkeep.storage.objects.paths import ReadablePath
    from kvkeep.storage.snapshots.codec import Codec

_SILENT_WAIT_SECONDS = 1.0  # for standard input, before a message says so


@options.command(cls=OptionsOnlyCommand, hint="give the prompt with -p: kvkeep generate -p {}")
def generate(
    prompt: str | None = options.option("-p", metavar="TEXT", help="Text to continue."),
    file: str | None = options.option(
        "-f", metavar="FILE", help='File with the text; "-": standard input.'
    ),
    special: bool = options.SPECIAL_OPTION,
    max_tokens: int = options.integer_option(
        "-n", minimum=-1, default=256, help="Maximum tokens to generate; -1: no limit."
    ),
    session: str | None = options.option(
        metavar="NAME",
        shell_complete=complete_sessions,
        help="Resume this session, or start it; saved at the end.",
    ),
    cache_prompt: Path | None = options.file_option(
        help="Prefill the prompt, save the session to a file, and exit. An existing snapshot is "
        "replaced."
    ),
    restore_prompt: Path | None = options.file_option(
        help="Continue from a file that --cache-prompt wrote."
    ),
    codec: "Codec | None" = options.choice_option(
        memory.CODEC_NAMES, memory.CODEC_HELP, show_default="exact, or as it was saved"
    ),
    settings: memory.SessionOptions = memory.session_options(
        memory.keep_option(
            "First tokens that are never evicted; -1: the first prompt.",
            minimum=memory.WHOLE_PROMPT,
        )
    ),
    ignore_eos: bool = options.option(is_flag=True, help="Continue after an end token."),
    speculate: bool = options.SPECULATE_OPTION,
    output: options.OutputOptions = options.OUTPUT_OPTIONS,
) -> None:
    """Continue a text.

    The prompt is --file followed by --prompt, or else standard input. It is tokenized as plain
    text: without a chat template, and special tokens in it are parsed only with --special.
    Generated text goes to standard output, progress and statistics to standard error. Ctrl-C stops.

    With --session or --restore-prompt, the prompt is appended to the saved session; without a
    prompt, or with empty standard input, generation continues where it stopped. The model,
    --policy and --max-kv-size are those of the session.
    """
    output.check()
    settings.check()
    _check_files(session, cache_prompt, restore_prompt, codec, settings)
    store = settings.prefixes.store
    lock = nullcontext() if session is None else open_session_store(store).lock(session)
    with lock as session_file:
        is_saved = session_file is not None and session_file.exists()
        snapshot_file = session_file if is_saved else restore_prompt
        needs_prompt = snapshot_file is None or prompt is not None or file is not None
        text = options.read_prompt(prompt, file) if needs_prompt else _read_piped_text()

        from kvkeep.cli.run import SessionRun

        opened = _open_session(snapshot_file, codec, settings, output.progress)
        sampling = settings.sampling.resolve(opened.model.default_sampling, opened.seed)
        if codec is not None:
            opened.session.snapshot().require_codec(codec)  # before any prompt is evaluated
        run = SessionRun("generate", opened, output, sampling.seed)
        if session_file is not None:
            label = f"session {session}"
            saved_codec = codec or opened.codec
            run.writer = SessionWriter(
                opened.session, session_file, label, opened.notes, saved_codec
            )
        if snapshot_file is not None:
            apply_keep(opened, settings.memory.keep)
        with run.reporting():
            _prefill(run, opened, opened.model.text.encode(text, special))
            if cache_prompt is not None:
                label = str(cache_prompt)
                run.writer = SessionWriter(
                    opened.session, cache_prompt, label, opened.notes, codec or "none"
                )
                run.writer.write()
                reason = "end"
            else:
                limit = None if max_tokens < 0 else max_tokens
                reason = run.generate(limit, sampling, ignore_eos, speculate=speculate)
        run.close(reason)


def _check_files(
    session: str | None,
    cache_prompt: Path | None,
    restore_prompt: Path | None,
    codec: "Codec | None",
    settings: memory.SessionOptions,
) -> None:
    """Raise InvalidArgument for options of files that exclude each other or have no effect."""
    if session is not None and (cache_prompt or restore_prompt):
        raise InvalidArgument(
            "--session already loads and saves the session: leave out --cache-prompt and "
            "--restore-prompt (`kvkeep sessions import` creates a session from such a file)"
        )
    is_stored = session is not None or cache_prompt is not None or settings.prefixes.prefix_cache
    if codec is not None and not is_stored:
        raise InvalidArgument(
            "--codec is for what is saved: use --session, --cache-prompt or --prefix-cache too"
        )
    if cache_prompt is not None:
        check_output_path(cache_prompt, "snapshot")


def _open_session(
    snapshot_file: "ReadablePath | None",
    codec: "Codec | None",
    settings: memory.SessionOptions,
    progress: bool,
) -> OpenedSession:
    """Resume the session in a file, or create one if there is none."""
    if snapshot_file is not None:
        return resume(snapshot_file, settings.memory, progress)
    model = settings.memory.load(progress)
    prefix_store = settings.open_prefix_cache(model, codec)
    return OpenedSession(model, settings.memory.new_session(model, store=prefix_store))


def _read_piped_text() -> str:
    """Return standard input, or "" at a terminal. Says so if nothing is written to a pipe yet."""
    if sys.stdin.isatty():
        return ""
    with suppress(ValueError, OSError):  # not a file
        if not select.select([sys.stdin], [], [], _SILENT_WAIT_SECONDS)[0]:
            say("waiting for text on standard input; without any, add < /dev/null")
    return options.read_text(options.STDIN)


def _prefill(run: "SessionRun", opened: OpenedSession, prompt: list[int]) -> None:
    """Prefill what an interrupt left of an earlier prompt, which is in the notes; then a prompt.

    prompt: token ids. After an interrupt, the notes get the rest. `cache.time`: evaluated tokens.
    """
    start_tokens, ids = opened.session.cache.time, [*opened.notes.get(UNREAD_KEY, []), *prompt]
    if start_tokens == 0:
        opened.notes.setdefault(FIRST_PROMPT_KEY, len(ids))
    if not ids:
        return
    try:
        run.feed(ids)
    except KeyboardInterrupt:
        opened.notes[UNREAD_KEY] = ids[opened.session.cache.time - start_tokens :]
        raise
    opened.notes.pop(UNREAD_KEY, None)
