"""The context that a session holds: looked at, named, pinned, edited and compressed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvkeep import validation
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.methods import Budget, make_method
from kvkeep.compression.plan import (
    CompressionPlan,
    CompressionReport,
    best_at_once,
    compress_held,
)
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.memory import trim
from kvkeep.runtime.worker import computes, computes_itself
from kvkeep.session.edit import EditReport, Recompute, prepare_edit
from kvkeep.session.held import Held
from kvkeep.session.spans import Place, after_edit

WHOLE_PROMPT = -1  # keep: all of the first prompt


class Context(Held):
    """What a session holds of its tokens, and every way to change it but by adding to its end.

    A call that is refused changes nothing.
    """

    @property
    def keep(self) -> int:
        """How many of the first tokens stay for ever; -1 until the first prompt is known.

        Setting a larger number pins the oldest cells still held; a smaller one lets them go.
        """
        return WHOLE_PROMPT if self._state.keep_whole_prompt else self._memory.policy.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        keep = validation.whole("keep", keep)
        if keep == WHOLE_PROMPT:
            self._memory.policy.with_settings(keep=0)  # refused where nothing is kept apart
        with self._changing() as work:
            work.keep_whole_prompt = keep == WHOLE_PROMPT and not work.memory.tokens
            if not work.keep_whole_prompt:
                work.memory.change(keep=keep)

    @property
    def discard(self) -> int:
        """How many of the oldest cells go at once at the budget; 0 where none ever goes.

        Policy "shift" lets it be set, to 0 for half of what is neither kept nor pinned.
        """
        return self._memory.policy.discards(self.cache)

    @discard.setter
    def discard(self, discard: int) -> None:
        if "discard" not in self._memory.policy.settings():
            raise InvalidArgument(
                f'policy "{self.policy}" has no discard to set; policy="shift" has'
            )
        with self._changing() as work:
            work.memory.change(discard=validation.whole("discard", discard))

    # Changing what is in it

    @computes_itself
    def delete(
        self, start: int | str, end: int | None = None, recompute: Recompute = "none"
    ) -> EditReport:
        """Takes out tokens `start ... end - 1`, or a named span.

        Args:
            recompute: "none" leaves later cells as they were computed, so that the edit costs
                little; "suffix" evaluates everything after it anew, which is exact.

        What is forgotten altogether, every token of it, has no cell that could go: with "none" it
        goes from `tokens`. An empty span goes, too. In either case nothing is evaluated.

        Raises:
            InvalidArgument: no such range or span, or some of it is no longer remembered.
        """
        place = self._range(start, end)
        if recompute == "none" and place[0] == place[1]:
            self._rename({}, without=str(start))
            return EditReport(0, 0, 0.0, recompute)
        if recompute == "none" and self._is_forgotten(place):
            return self._strike(*place)
        return self._edit(*place, [], recompute)

    @computes_itself
    def insert(
        self,
        at: int,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Puts text or token ids in before token `at`. Otherwise as `delete`.

        special: as of `Session.feed`. Raises ContextFull where it does not fit.
        """
        at = validation.whole("at", at)
        return self._edit(at, at, self._ids(text, special), recompute)

    @computes_itself
    def replace(
        self,
        start: int | str,
        end: int | None,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Puts text or token ids in the place of a range, or of a named span (`end` None).

        Otherwise as `delete` and `insert`. A pinned or kept range stays pinned or kept, and a span
        that is replaced by its name is what was put there, also if it was empty.
        """
        place, ids = self._range(start, end), self._ids(text, special)
        return self._edit(*place, ids, recompute, start if isinstance(start, str) else None)

    @computes_itself
    def make_room(self, count: int, bridge: str = " (...) ", keep: int | None = None) -> EditReport:
        """Takes out old tokens so that `count` more fit, and bridges the gap.

        The first `keep` tokens stay (by default those that the policy keeps, or 4), then comes the
        bridge, then what is left. So a session whose context is full goes on.
        """
        count, keep = validation.whole("count", count), validation.optional_whole("keep", keep)
        kept = min(self.keep, 4) if self.policy == "full" else self.keep
        first, ids = kept if keep is None else keep, self._ids(bridge, special=False)
        free = len(self._memory.tokens) - first - len(ids) - 1
        if not 1 <= count <= free or first < 0:
            raise InvalidArgument(
                f"make_room takes 1 to {free} tokens here, with the first {first} kept and a "
                f"bridge of {len(ids)}; found {count}"
            )
        end = first + count + len(ids)
        if self._memory.pins & set(self._memory.serials[first:end]):
            raise InvalidArgument(
                f"make_room would take out tokens {first} to {end}, and some of them are pinned: "
                "unpin them, or keep more"
            )
        return self._edit(first, end, ids, "none")

    @computes_itself
    def compress(
        self,
        ratio: float = 2.0,
        method: str | None = None,
        recent: int | None = None,
        seed: int = 0,
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
        budget: Budget | None = None,
    ) -> CompressionReport:
        """Leaves `ratio` times fewer cells, once; each KV head keeps its own.

        The first four, the newest `recent` and pinned tokens stay as they are. What the method
        keeps, merges or forgets cannot be edited or named any more. Policy "full" only: "archive"
        compresses as it goes.

        Args:
            recent: None for 64 where all heads keep as many. Where they compete, for half of what
                is left at ratios up to 4, less above (2 / ratio of it), and for 32 at least.
            method: see `kvkeep.compression.methods`. None: "kvzap" by a calibration that has a
                surrogate, and without one "kvzip", which has the text repeated in about the
                time of reading it; "fitted" where some of it was compressed before.
            seed: of method "random".
            calibration: what is known of the model, for methods that decide by it.
            progress: called after each chunk with the number of cells that were in it.
            budget: "uniform", each 512 cells become so many fewer in every layer and KV head, or
                "heads", whatever is worth most stays, in whichever head it is: some then keep
                much, and others nothing. None: what is best for the method; "kvzip" then leaves
                only what the text says once more, word for word, where that is enough.

        Raises InvalidArgument where that cannot be done, before anything is changed.
        """
        ratio = validation.number("ratio", ratio)
        seed = validation.whole("seed", seed, 0)
        progress = validation.progress(progress)
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(self._model)
        statistics = calibration.statistics if calibration else None
        chosen = make_method(best_at_once(self._memory, statistics) if method is None else method)
        recent = validation.optional_whole("recent", recent)
        plan = CompressionPlan(
            chosen, ratio, budget, self._model.text, recent, seed, statistics, progress
        )
        memory, report = compress_held(self._memory, plan)
        self._state = replace(self._state, memory=memory)
        trim()
        return report

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Names the tokens that come within the block; see `spans`.

        A name is free again once all tokens of its span are forgotten or compressed. An exception
        leaves it free, too; the tokens that came before it stay.
        """
        name = validation.text("name", name)
        if name in self._state.spans and not self._is_forgotten(self._state.spans[name]):
            raise InvalidArgument(f"there is a span {name!r} already")
        try:
            first = len(self._memory.tokens)
            self._rename({name: (first, first)})
            yield
            total = len(self._memory.tokens)
            first, _ = self._state.spans.get(name, (total, total))
            self._rename({name: (first, total)})
        except BaseException:
            self._rename({}, without=name)
            raise

    def _rename(self, places: Mapping[str, Place], without: str | None = None) -> None:
        """Gives names to places, and takes one away."""
        with self._changing() as work:
            spans = {**work.spans, **places}
            work.spans = {name: place for name, place in spans.items() if name != without}

    def remembered(self, start: int | str, end: int | None = None) -> int:
        """How many tokens of a range or a named span are still held."""
        first, last = self._range(start, end)
        held = set(self.cache.serials())
        return sum(serial in held for serial in self._memory.serials[first:last])

    @computes
    def name(self, name: str, start: int, end: int) -> None:
        """Names a range of tokens that are there already; a name in use moves to it."""
        self._rename({validation.text("name", name): self._range(start, end)})

    def pin(self, start: int | str, end: int | None = None) -> None:
        """Never forgets a range or a named span, wherever it lies, until it is unpinned.

        Raises InvalidArgument where it is not all remembered, overlaps another pin, or would
        leave no room for a window.
        """
        with self._changing() as work:
            work.memory.pin(*self._range(start, end))

    def unpin(self, start: int | str, end: int | None = None) -> None:
        """Lets a pinned range go: it is forgotten as the window moves on."""
        with self._changing() as work:
            work.memory.unpin(*self._range(start, end))

    def _range(self, start: int | str, end: int | None) -> Place:
        if isinstance(start, str):
            if end is not None:
                raise InvalidArgument(f"a span's name takes no end; found {start!r} to {end}")
            spans = self._state.spans
            if start not in spans:
                known = ", ".join(spans) or "none"
                raise InvalidArgument(f"there is no span {start!r}; there are: {known}")
            return spans[start]
        start, end = validation.whole("start", start), validation.optional_whole("end", end)
        total = len(self._memory.tokens)
        if end is None or not 0 <= start < end <= total:
            raise InvalidArgument(
                f"a range needs 0 <= start < end <= {total}; found {start} to {end}"
            )
        return start, end

    def _is_forgotten(self, place: Place) -> bool:
        """Whether there are tokens in that place, of which none has a cell of its own any more."""
        start, end = place
        return start < end and set(self._memory.serials[start:end]).isdisjoint(self.cache.serials())

    def _strike(self, start: int, end: int) -> EditReport:
        """Takes forgotten tokens off the list."""
        self._memory.require_no_states("edited")
        if any(segment.compressed for segment in self.cache.segments):
            raise InvalidArgument(
                f"tokens {start} to {end} are not remembered, but may live on in compressed "
                "cells, which they share with others: what was compressed cannot be taken out"
            )
        with self._changing() as work:
            work.memory.strike(start, end)
            work.move_spans(lambda span: after_edit(span, start, end, 0))
        return EditReport(0, 0, 0.0, "none")

    def _edit(
        self, start: int, end: int, ids: list[int], recompute: Recompute, name: str | None = None
    ) -> EditReport:
        """name: of the span that is replaced."""
        self._state.check_prompt(len(ids))
        prepared = prepare_edit(self._memory, start, end, ids, recompute, self.prefill_step)
        with self._changing() as work:
            work.memory, report = prepared.made_in(work.memory)
            work.keep_prompt(len(ids))
            work.move_spans(lambda span: after_edit(span, start, end, len(ids)))
            if name is not None and ids:
                work.spans = {**work.spans, name: (start, start + len(ids))}
        return report

    # How

    def _ids(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        if isinstance(prompt, str):
            return self._text.encode(prompt, validation.flag("special", special))
        return validation.token_ids("tokens", prompt, self._model.spec.vocab_size)
