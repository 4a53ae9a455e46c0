"""A session and the naive memory beside it, and what a user may do to both."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from dense_reference import DenseMemory, Refused
from hypothesis import strategies as st
from small_models import altup_spec, local_spec, small_model, unrotated_spec

from kvkeep import Snapshot
from kvkeep.errors import KvkeepError
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.session.session import Session

Action = tuple[str, tuple]
TOKENS = st.lists(st.integers(1, 255), min_size=1, max_size=30)
FEW = st.lists(st.integers(1, 255), max_size=6)
PLACE = st.floats(0, 1)  # of the text
MODE = st.sampled_from(["none", "suffix"])
FEED = st.tuples(st.just("feed"), st.tuples(TOKENS))
EDIT = st.tuples(st.just("edit"), st.tuples(PLACE, st.integers(0, 8), FEW, MODE))
ACTION = st.one_of(
    FEED,
    EDIT,
    EDIT,
    st.tuples(st.just("next"), st.tuples()),
    st.tuples(st.just("pin"), st.tuples(PLACE, st.integers(1, 5))),
    st.tuples(st.just("unpin"), st.tuples(PLACE, st.integers(1, 9))),
    st.tuples(st.just("keep"), st.tuples(st.integers(0, 10))),
    st.tuples(st.just("discard"), st.tuples(st.integers(0, 10))),
    st.tuples(st.just("rewind"), st.tuples(st.integers(0, 8))),
    st.tuples(st.just("make_room"), st.tuples(st.integers(1, 6), FEW)),
    st.tuples(st.just("fork"), st.tuples()),
    st.tuples(st.just("snapshot"), st.tuples()),
)
ACTIONS = st.tuples(FEED, st.lists(ACTION, min_size=1, max_size=12)).map(lambda x: [x[0], *x[1]])


def loud_model(spec: ModelSpec | None = None) -> Model:
    """A small model with logits of about 40, as the real one has."""
    model = small_model(spec=spec)
    tensors = dict(model.decoder.tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 4
    return Model("loud", Path("loud"), Decoder(model.spec, tensors), model.text)


MODEL = loud_model()
LOCAL_MODEL = loud_model(local_spec())  # of which most layers see no more than eight tokens
ALTUP_MODEL = loud_model(altup_spec())  # several residual streams, and layers without cells
NOPE_MODEL = loud_model(unrotated_spec())


@dataclass(frozen=True)
class Setting:
    policy: str
    max_kv_size: int
    keep: int
    discard: int
    prefill_step: int
    model: Model = MODEL

    def pair(self) -> "Pair":
        bounded = self.policy != "full"
        session = self.model.session(
            self.max_kv_size,
            self.keep if bounded else None,
            self.policy,
            self.prefill_step,
            discard=self.discard if self.policy == "shift" else None,
        )
        keep = self.keep if bounded else self.max_kv_size
        discard = self.discard if self.policy == "shift" else 1
        dense = DenseMemory(self.model.decoder, self.max_kv_size, keep, discard, bounded)
        return Pair(session, dense, self.model)


@st.composite
def settings_of(draw: st.DrawFn, policies: tuple[str, ...], model: Model = MODEL) -> Setting:
    policy = draw(st.sampled_from(policies))
    max_kv_size = draw(st.integers(64, 96) if policy == "full" else st.integers(2, 24))
    keep = draw(st.integers(0, max_kv_size - 1))
    discard = draw(st.integers(0, max_kv_size - keep))
    return Setting(policy, max_kv_size, keep, discard, draw(st.sampled_from([1, 3, 64])), model)


@dataclass
class Pair:
    """others: forks that were left behind, each with the logits that it stood at."""

    session: Session
    dense: DenseMemory
    model: Model = MODEL
    others: list[tuple[Session, torch.Tensor, list[int]]] = field(default_factory=list)

    def act(self, action: Action, folder: Path) -> bool:
        """Does it to both. Returns whether it was done; both must agree on that."""
        kind, values = action
        do = getattr(self, f"_{kind}")
        if kind in ("fork", "snapshot"):
            do(folder)
            return True
        mine, theirs = do(*values)
        try:
            mine()
        except KvkeepError as error:
            refused: KvkeepError | None = error
        else:
            refused = None
        before = self.dense.copy()
        try:
            theirs()
        except Refused:
            self.dense = before
            assert refused is not None, f"{action} should have been refused"
        else:
            assert refused is None, f"{action} was refused: {refused}"
        return refused is None

    def difference(self) -> float:
        """The largest between the two sides' logits."""
        if self.session.logits is None or self.dense.hidden is None:
            assert self.session.logits is None
            assert self.dense.hidden is None
            return 0.0
        return float((self.session.logits - self.dense.logits()).abs().max())

    # For each kind of action: what the session does, and what the naive memory does.

    def _feed(self, ids):
        return lambda: self.session.feed(ids), lambda: self.dense.feed(ids)

    def _next(self):
        def theirs() -> None:
            if self.dense.hidden is None:
                raise Refused
            # With equal logits they would take the same; a tie within rounding must not matter.
            self.dense.feed([self.session.tokens[-1]])

        if not self.dense.bounded and len(self.dense.held) == self.dense.max_kv_size:
            return self.session.next_token, lambda: self.dense.feed([1])
        return self.session.next_token, theirs

    def _edit(self, place, removed, ids, mode):
        total = len(self.dense.tokens)
        start = min(round(place * total), total)
        end = min(start + removed, total)
        session = self.session
        if start == end:
            mine = lambda: session.insert(start, ids, mode)  # noqa: E731
        elif ids:
            mine = lambda: session.replace(start, end, ids, mode)  # noqa: E731
        else:
            mine = lambda: session.delete(start, end, mode)  # noqa: E731
        return mine, lambda: self.dense.edit(start, end, ids, mode == "suffix")

    def _range(self, place, count):
        total = len(self.dense.tokens)
        start = min(round(place * total), max(0, total - 1))
        return start, min(start + count, total)

    def _pin(self, place, count):
        where = self._range(place, count)
        return lambda: self.session.pin(*where), lambda: self._ranged(self.dense.pin, where)

    def _unpin(self, place, count):
        where = self._range(place, count)
        return lambda: self.session.unpin(*where), lambda: self._ranged(self.dense.unpin, where)

    def _ranged(self, do, where):
        if where[0] == where[1]:
            raise Refused
        do(*where)

    def _keep(self, keep):
        def theirs() -> None:
            if not self.dense.bounded:
                raise Refused
            self.dense.set_keep(keep)

        return lambda: setattr(self.session, "keep", keep), theirs

    def _discard(self, discard):
        def theirs() -> None:
            if self.session.policy != "shift":
                raise Refused
            self.dense.set_discard(discard)

        return lambda: setattr(self.session, "discard", discard), theirs

    def _rewind(self, count):
        return lambda: self.session.rewind(count), lambda: self.dense.rewind(count)

    def _make_room(self, count, ids):
        first = self.dense.keep if self.dense.bounded else min(self.dense.keep, 4)
        end = first + count + len(ids)

        def theirs() -> None:
            total = len(self.dense.tokens)
            these = self.dense.tokens[first:end]
            if end >= total or any(t.pinned or not t.held for t in these):
                raise Refused
            self.dense.edit(first, end, ids, False)

        bridge = MODEL.text.decode(ids)
        if MODEL.text.encode(bridge) != ids:  # not every run of bytes is text
            ids.clear()
            bridge, end = "", first + count
        return lambda: self.session.make_room(count, bridge), theirs

    def _fork(self, folder):
        left = self.session
        self.session = left.fork()
        if left.logits is not None:
            self.others.append((left, left.logits, left.tokens))

    def _snapshot(self, folder):
        path = folder / "session.kvkeep"
        self.session.snapshot().save(path)
        left = self.session
        self.session = self.model.restore(Snapshot.load(path))
        if left.logits is not None:
            assert torch.equal(self.session.logits, left.logits)
