"""The methods of a session that edit its text: delete, insert, replace, align and rewind."""

from collections.abc import Callable, Sequence

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.worker import computes_in_caller, computes_in_worker
from kvkeep.session.aligning import align
from kvkeep.session.alignment import (
    DEFAULT_MIN_SAVED,
    DEFAULT_REREAD,
    DEFAULT_REREAD_SHARE,
    AlignmentOptions,
    AlignmentReport,
)
from kvkeep.session.checkpoints import take_back
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.editing import EditReport, Recompute, edit_tokens, remove_forgotten, rewind
from kvkeep.types import AlignmentMode


class SessionEdits:
    """The methods of a `Session` that edit its text."""

    core: SessionCore

    @computes_in_caller
    def delete(
        self,
        start: int | str,
        end: int | None = None,
        recompute: Recompute = "none",
        progress: Callable[[int], None] | None = None,
    ) -> EditReport:
        """Remove tokens `start ... end - 1`, or a named span.

        recompute: "none" leaves later cells as they were computed, so that the edit costs little;
            "suffix" evaluates everything after it again, which is exact.
        progress: called after each step with the number of tokens in it; must not change the
            session.

        With "none", a range without any cell left is removed from `tokens`, and an empty span from
        `spans`, without evaluating anything. Raises InvalidArgument if there is no such range or
        span, or some of it is no longer remembered.
        """
        core, (first, last) = self.core, self.core.token_range(start, end)
        progress = validation.progress(progress)
        if recompute == "none" and first == last:
            core.set_span(str(start), None)
            return EditReport(0, 0, 0.0, recompute)
        if recompute == "none" and core.is_forgotten((first, last)):
            return remove_forgotten(core, first, last)
        return edit_tokens(core, first, last, [], recompute, progress=progress)

    @computes_in_caller
    def insert(
        self,
        at: int,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> EditReport:
        """Insert text or token ids before token `at`; see `delete`, and `feed` for `special`.

        Raises ContextFull if it does not fit.
        """
        at, progress = validation.integer("at", at), validation.progress(progress)
        ids = self.core.encode(text, special)
        return edit_tokens(self.core, at, at, ids, recompute, progress=progress)

    @computes_in_caller
    def replace(
        self,
        start: int | str,
        end: int | None,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> EditReport:
        """Replace a range, or a named span (`end` None), by text or token ids; see `insert`.

        A pinned or kept range stays pinned or kept. A span that is replaced by its name becomes the
        range of the new tokens, even if it was empty.
        """
        (first, last), ids = self.core.token_range(start, end), self.core.encode(text, special)
        span_name = start if isinstance(start, str) else None
        progress = validation.progress(progress)
        return edit_tokens(self.core, first, last, ids, recompute, span_name, progress)

    @computes_in_caller
    def make_room(self, count: int, bridge: str = " (...) ", keep: int | None = None) -> EditReport:
        """Remove old tokens so that `count` more fit, and insert `bridge` in their place.

        The first `keep` tokens stay: by default those that the policy keeps, or 4.
        """
        count = validation.integer("count", count)
        keep = validation.optional_integer("keep", keep, 0)
        core, memory = self.core, self.core.memory
        memory.require_no_states(
            "edited in place", 'use delete and insert with recompute="suffix", or a new session'
        )
        if keep is None:
            keep = min(core.state.keep, 4) if memory.policy.name == "full" else core.state.keep
        ids = core.encode(bridge, special=False)
        max_count = len(memory.tokens) - keep - len(ids) - 1
        if max_count < 1:
            raise InvalidArgument(
                f"make_room has nothing to remove: of {len(memory.tokens)} tokens, {max(0, keep)} "
                f"are kept, the bridge takes {len(ids)}, and the last one stays; lower keep"
            )
        if not 1 <= count <= max_count:
            raise InvalidArgument(
                f"make_room takes 1 to {max_count} tokens, with {keep} kept tokens and a bridge of "
                f"{len(ids)}; found {count}"
            )
        end = keep + count + len(ids)
        if memory.pins & set(memory.serials[keep:end]):
            raise InvalidArgument(
                f"make_room would remove tokens {keep} to {end}, some of which are pinned: unpin "
                "them, or increase keep"
            )
        return edit_tokens(core, keep, end, ids, "none")

    @computes_in_caller
    def rewind(self, count: int, progress: Callable[[int], None] | None = None) -> list[int]:
        """Remove and return the last `count` tokens.

        The token before them is evaluated again, as a prompt's, over the cells still held; in
        models with local layers or states, also those before it since the last checkpoint. Evicted
        cells do not come back: the window is shorter until it fills again. All tokens can always be
        removed. Raises InvalidArgument otherwise if the token before them is no longer held.

        progress: called after each step with the number of tokens in it; must not change the
            session.
        """
        count, progress = validation.integer("count", count), validation.progress(progress)
        return rewind(self.core, count, progress)

    @computes_in_caller
    def align(
        self,
        prompt: str | Sequence[int],
        *,
        mode: AlignmentMode = "in_place",
        min_saved: int = DEFAULT_MIN_SAVED,
        reread: int = DEFAULT_REREAD,
        reread_share: float = DEFAULT_REREAD_SHARE,
        special: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> AlignmentReport:
        """Replace the session's text by a prompt, reusing the cells of equal tokens.

        Where the prompt and the text differ, tokens are deleted, inserted and replaced. With mode
        "in_place" the cells of later equal tokens stay as they were computed, after another text:
        this is cheap, and not exact. "exact" evaluates everything after the first difference again,
        and so does "in_place" where it would save fewer than `min_saved` tokens. With either, pins,
        spans and `keep` stay with the tokens that are equal, and grow by those between them.

        reread: how many tokens after each edit in place are evaluated again, at most: more cost
            more, and come closer to an exact evaluation.
        reread_share: re-evaluation stops once this share of the prompt's tokens is evaluated, new
            tokens included; `reread` tokens in total are always allowed. It is divided among the
            edits in proportion to their sizes. 1 for no limit.
        special: see `feed`.
        progress: called after each step with the number of tokens in it; must not change the
            session.

        Raises InvalidArgument if it cannot be done, as "in_place" for models with states and for
        sessions whose tokens were evicted or compressed, or if pins have no room; and ContextFull
        as `feed`. Nothing is changed then, or by Ctrl-C.
        """
        options = AlignmentOptions(mode, min_saved, reread, reread_share)
        ids = self.core.encode(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        return align(self.core, ids, options, validation.progress(progress))

    @computes_in_worker
    def take_back(self, count: int) -> None:
        """Remove the last `count` tokens without evaluating any, as speculative decoding does.

        There are no logits until more is fed. Raises InvalidArgument if earlier ones were evicted.
        """
        with session_transaction([self.core]) as (state,):
            take_back(state.memory, validation.integer("count", count, 0))
            state.truncate_spans(len(state.memory.tokens))
