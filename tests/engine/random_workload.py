"""Random work for an engine, each result of which must equal that of the request alone.

A generation that continues after a sampled token (the next turn of a chat), or in a named session,
is compared with the same requests, and no others, in an engine of their own.
"""

import copy
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.workload import Change, Create, Fork, Request, Result, Work, batch
from speculation_cases import Drafts

from kvkeep.engine import Engine, Limits, PinRequest
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.errors import Cancelled, ContextFull, InvalidArgument, NoRoom
from kvkeep.model import Model
from kvkeep.session.sampling import Sampling

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=4),
    Sampling(presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((7, 2.0),)),
)
_MOST_STEPS = 5  # of the work that leads to one session


class World:
    """An engine, and the work that led to each of its sessions.

    works: by a session's name, the work that leads to it.
    company: whether several generations run at the same time, those of one prompt included. alike:
    sessions of forks that generated the same text, which are equal to rounding only.
    """

    def __init__(
        self,
        model: Model,
        settings: dict[str, Any],
        seed: int,
        folder: Path | None = None,
        company: bool = True,
    ):
        self.model, self.settings, self.folder = copy.copy(model), settings, folder
        self.model.message_end_ids = frozenset(range(1, 12))  # so steps end at some of these, too
        self._company, self._sizes = company, (1, 1, 2, 3, 5) if company else (1,)
        self.random, self._random_pins = random.Random(seed), random.Random(seed)
        self.works: dict[str, tuple[Work, ...]] = {}
        self.texts: dict[str, tuple[int, ...]] = {}
        self.named: set[str] = set()
        self.alike: set[str | None] = set()
        self.answers, self.reused, self.went_on = 0, 0, 0
        self.differing: list[str] = []
        self._number = 0
        self._alone: dict[tuple[Work, ...], list[Result]] = {}
        first = self._drawn(1000)
        self.bases = [first, first[:150] + self._drawn(850), self._drawn(400)]
        self.engine = self._open()

    def _drawn(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(1, 250) for _ in range(count))

    def _open(self) -> Engine:
        session = self.model.session(**self.settings)
        memory = 12 * session.cache.layout.cell_bytes * self.settings["max_kv_size"]
        if session.core.memory.overwrites:
            memory = 8 * max_session_bytes(session, None)
        if self.folder is None:
            return Engine(self.model, settings=self.settings)
        return Engine(
            self.model,
            settings=self.settings,
            limits=Limits(memory=memory),
            folder=self.folder / "sessions",
            stores=self.folder / "prefixes",
        )

    def run(self, answers: int) -> None:
        """Work until there are so many results, with drafts of known texts, often with mistakes."""
        with ExitStack() as stack:
            stack.enter_context(Drafts(random.Random(answers), self.texts.values()).used())
            stack.callback(lambda: self.engine.close())
            while self.answers < answers:
                kind = self.random.random()
                if kind < 0.72 or not self.named:
                    self._batch()
                elif kind < 0.92:
                    self._change()
                elif self.folder is not None:
                    self.engine.close()
                    self.engine = self._open()
                if len(self.named) < 3 and self.random.random() < 0.3:
                    self._create()

    # Requests

    def _batch(self) -> None:
        requests = [self._request() for _ in range(self.random.choice(self._sizes))]
        named = [r.session for r in requests if r.session]
        if len(set(named)) < len(named):
            requests = [replace(r, session=None) if r.prompt else r for r in requests]
            requests = [r for r in requests if r.prompt]
        before = dict(self.works), dict(self.texts)
        try:
            results = batch(self.engine, requests)
        except (NoRoom, ContextFull, InvalidArgument):
            return
        for request, own in zip(requests, results, strict=True):
            if own and not any(_refused(result) for result in own):
                self._check(request, own, *before)

    def _request(self) -> Request:
        draw = self.random
        session = None
        if self.named and draw.random() < 0.25:
            session = draw.choice(sorted(self.named))
        count = draw.choice((0, 0, 1, 2, 5, 9))
        prompt = self._prompt() if session is None else self._drawn(draw.choice((0, 3, 40, 128)))
        if session is not None and not prompt and (count == 0 or not self.texts.get(session)):
            prompt = self.bases[0][:60]
        several = session is None and draw.random() < 0.15 and self._company
        ways = tuple(draw.choice(SAMPLINGS) for _ in range(draw.choice((2, 3)) if several else 1))
        cancel = None
        if draw.random() < 0.25 and not several:
            what = draw.choice(("read", "written"))
            cancel = (what, draw.randrange(1, max(2, len(prompt) if what == "read" else count)))
        return Request(prompt, count, ways, session, cancel, pins=self._pins())

    def _pins(self) -> tuple[PinRequest, ...]:
        """Return requests to pin prefixes, which change no result."""
        draw = self._random_pins
        lengths = (None, 50, 128, 400)
        return tuple(
            PinRequest(draw.choice((0.1, 60.0)), draw.choice(lengths), draw.choice(("", "", "key")))
            for _ in range(draw.choice((0, 0, 1, 2)))
        )

    def _prompt(self) -> tuple[int, ...]:
        """A prefix of a common text or of a session's text, and perhaps more."""
        draw, step = self.random, self.settings["prefill_step"]
        most = min(self.settings["max_kv_size"], 700)
        known = [
            name
            for name, text in self.texts.items()
            if text and len(self.works[name]) < _MOST_STEPS
        ]
        if known and draw.random() < 0.4:
            text = self.texts[draw.choice(known[-8:])]
            text = text if draw.random() < 0.7 else text[: draw.randrange(len(text)) + 1]
        else:
            border = draw.choice((step, 32, 128, 256)) * draw.randrange(1, 5)
            length = draw.choice((border + draw.randrange(-1, 2), draw.randrange(1, most)))
            text = draw.choice(self.bases)[: max(1, length)]
        return (text + self._drawn(draw.choice((0, 1, 20, 130))))[: most - 12] or self.bases[0][:5]

    def _check(
        self,
        request: Request,
        results: list[Result],
        works: dict[str, tuple[Work, ...]],
        texts: dict[str, tuple[int, ...]],
    ) -> None:
        """Compare results with those of the same request alone, and note the sessions they left."""
        source, reuse = results[0].reuse.session, results[0].reuse
        before: tuple[Work, ...] = ()
        if request.session is not None:
            before = works[request.session]
        elif source in texts and reuse.resumed:
            before = works[source]
            self.went_on += 1
        self.reused += bool(reuse.tokens)
        rounded = bool(before) and source in self.alike
        if rounded or len({result.tokens for result in results}) < len(results):
            self.alike |= {result.name for result in results}
        alone = self._expected((*before, replace(request, cancel=None)))
        for at, (result, other) in enumerate(zip(results, alone, strict=True)):
            self.answers += 1
            if not rounded and not result.same(other):
                self.differing.append(
                    f"{at} of {_said(request)} after {[_said(w) for w in before]}: "
                    f"{reuse}, written {result.written} for {other.written}"
                )
            self._note(request, result, before, len(results) > 1)

    def _note(
        self, request: Request, result: Result, before: tuple[Work, ...], several: bool
    ) -> None:
        done = request
        if not several:  # what was cancelled is as if no more had been asked for
            prompt, written = request.prompt[: result.read], len(result.written)
            done = replace(request, prompt=prompt, count=written, cancel=None)
        works = (*before, done) if done.prompt or done.count else before
        self.works[result.name], self.texts[result.name] = works, result.tokens

    def _expected(self, works: tuple[Work, ...]) -> list[Result]:
        if works not in self._alone:
            with Engine(self.model, settings=self.settings) as engine:
                results = [work.do(engine) for work in works]
            assert results[-1] is not None
            self._alone[works] = results[-1]
        return self._alone[works]

    # Sessions by name

    def _create(self) -> None:
        self._number += 1
        name = f"n{self._number}"
        own: dict[str, Any] = {}
        if self.settings.get("policy", "sliding") in ("full", "sliding", "shift"):
            own = self.random.choice(({}, {"kv_bits": None}, {"kv_bits": "8"}))
        if "far_bits" in self.settings:
            own = {}
        work = Create(name, tuple(own.items()))
        try:
            work.do(self.engine)
        except NoRoom:
            return
        self.named.add(name)
        self.works[name], self.texts[name] = (work,), ()

    def _change(self) -> None:
        draw = self.random
        name = draw.choice(sorted(self.named))
        text, works = self.texts[name], self.works[name]
        if len(works) >= _MOST_STEPS:
            self.engine.delete(name).result()
            self.named.remove(name)
            for known in (self.works, self.texts):
                del known[name]
            return
        if not text:
            return
        kind = draw.random()
        if kind < 0.4:
            self._number += 1
            at = draw.choice((None, draw.randrange(1, len(text) + 1)))
            self._do(Fork(name, at, f"n{self._number}"), name, f"n{self._number}")
        elif kind < 0.7:
            self._do(Change(name, "rewind", (draw.randrange(1, min(len(text), 60) + 1),)), name)
        elif kind < 0.8:
            start = draw.randrange(len(text))
            self._do(Change(name, "delete", (start, min(len(text), start + 5))), name)
        elif kind < 0.9:
            self._do(Change(name, "compress", (2.0, "knorm")), name)
        elif self.folder is not None:
            self.engine.save(name).result()

    def _do(self, work: Fork | Change, name: str, new: str | None = None) -> None:
        try:
            work.do(self.engine)
        except (InvalidArgument, NoRoom, ContextFull):
            return
        into = new or name
        self.named.add(into)
        self.works[into] = (*self.works[name], work)
        self.texts[into] = self.engine.inspect(
            into, "0", lambda kept: tuple(kept.live.tokens)
        ).result()


def _refused(result: Result) -> bool:
    return result.error is not None and not isinstance(result.error, Cancelled)


def _said(work: Work) -> str:
    if not isinstance(work, Request):
        return str(work)
    return (
        f"{len(work.prompt)} tokens + {work.count}, {len(work.samplings)} ways, "
        f"in {work.session}, cancelled at {work.cancel}"
    )
