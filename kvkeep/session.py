"""A session: one model's live memory, fed and asked for tokens."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.cache import Cells, KVCache
from kvkeep.errors import InvalidArgument
from kvkeep.memory import Memory
from kvkeep.policies import Policy, make_policy
from kvkeep.sampling import Sampler, Sampling
from kvkeep.store.prefix import BLOCK, PrefixStore
from kvkeep.store.snapshot import Snapshot
from kvkeep.streaming import TextStream

if TYPE_CHECKING:
    from kvkeep.model import Model

WHOLE_PROMPT = -1  # keep: all of the first prompt
GREEDY = Sampling()


@dataclass(frozen=True)
class FeedReport:
    """What a feed did.

    tokens: of the prompt. seconds: wall time. peak_cells: the most cells held at any moment,
    those of the step in progress included. reused: tokens that came from a prefix store and were
    not evaluated. differs_at: the first token at which the nearest stored prompt differs; None
    without a store, or where nothing more could have been reused.
    """

    tokens: int
    seconds: float
    peak_cells: int
    reused: int = 0
    differs_at: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Session:
    """Feed it text, ask it for tokens; it remembers what its policy keeps.

    A call that is refused changes nothing. Evaluation goes in steps, and a step counts whole or
    not at all: if a long feed is interrupted or fails in its middle, the session stands after
    the last whole step, and `tokens` says where that is.
    """

    def __init__(
        self, model: "Model", policy: Policy, prefill_step: int, store: PrefixStore | None = None
    ):
        if prefill_step < 1:
            raise InvalidArgument(f"prefill_step must be 1 or more; found {prefill_step}")
        self.prefill_step = prefill_step
        self.finish_reason: str | None = None
        self._model = model
        self._text = model.text
        self._memory = Memory(model.decoder, policy)
        self._sampler = Sampler()
        self._store = store
        self._keep_whole_prompt = False

    # What it holds

    @property
    def cache(self) -> KVCache:
        """The cells; `cache.cells` counts them and `cache.nbytes` says what they take."""
        return self._memory.cache

    @property
    def tokens(self) -> list[int]:
        """Every token id so far, also those that the policy has forgotten."""
        return self._memory.tokens.tolist()

    @property
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        current = self._memory.logits()
        return None if current is None else current.clone()

    @property
    def policy(self) -> str:
        return self._memory.policy.name

    @property
    def max_kv_size(self) -> int:
        return self._memory.policy.max_kv_size

    @property
    def room(self) -> int | None:
        """How many more tokens it can take; None if there is no end."""
        return self._memory.policy.room(self.cache)

    @property
    def keep(self) -> int:
        """How many of the first tokens stay for ever; -1 until the first prompt is known.

        Setting a larger number pins the oldest cells still held; a smaller one lets them go.
        """
        return WHOLE_PROMPT if self._keep_whole_prompt else self._memory.policy.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        if keep == WHOLE_PROMPT and not self._memory.tokens:
            self._keep_whole_prompt = True
            return
        self._memory.policy.change(self.cache, frozenset(), keep=keep)
        self._keep_whole_prompt = False

    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self._text.decode(self.tokens)

    # What it does

    def feed(
        self, prompt: str | Sequence[int], progress: Callable[[int], None] | None = None
    ) -> FeedReport:
        """Evaluates a prompt, of any length where the policy is bounded.

        Args:
            prompt: text, or token ids; no special token is added.
            progress: called after each step with the number of tokens in it.

        Raises:
            InvalidArgument: the prompt is empty or holds an id outside the vocabulary.
            ContextFull: the policy cannot take as many tokens.
            NonFiniteLogits: the model produced NaN or infinity.
        """
        begun, ids = time.perf_counter(), self._checked_ids(prompt)
        store = None if self._memory.tokens else self._store
        reused, differs_at = self._reuse(store, ids) if store else (0, None)
        if reused and progress:
            progress(reused)
        peak, stored = self.cache.cells, reused
        for step in self._memory.evaluate(ids[reused:], self.prefill_step):
            peak = max(peak, step.peak_cells)
            if store:
                stored = self._keep_blocks(store, stored)
            if progress:
                progress(step.hidden.shape[0])
        return FeedReport(len(ids), time.perf_counter() - begun, peak, reused, differs_at)

    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Samples a token, appends it and evaluates it.

        It never stops by itself: whether an end-of-text token ends anything is for the caller to
        say. Raises ContextFull and NonFiniteLogits as `feed` does, and InvalidArgument where
        nothing was fed yet.
        """
        logits = self._memory.logits()
        if logits is None:
            raise InvalidArgument("nothing to continue: feed a prompt before asking for tokens")
        self._memory.require_room(1)
        token = self._sampler.choose(logits, self._memory.tokens, sampling)
        for _ in self._memory.evaluate([token], 1):
            pass
        return token

    def stream(
        self,
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Text as it is written: whole characters only, without special tokens.

        Ends after `max_tokens` (None: never), at end-of-text unless `ignore_eos`, or before a
        stop string; `finish_reason` then says "length", "eos" or "stop". The tokens stay in the
        session, those of a stop string too.
        """
        if max_tokens is not None and max_tokens < 0:
            raise InvalidArgument(f"max_tokens must be 0 or more; found {max_tokens}")
        return self._stream(max_tokens, sampling, ignore_eos)

    def _stream(
        self, max_tokens: int | None, sampling: Sampling, ignore_eos: bool
    ) -> Iterator[str]:
        text, written = TextStream(self._text, sampling.stop), 0
        self.finish_reason = None
        while max_tokens is None or written < max_tokens:
            token = self.next_token(sampling)
            written += 1
            if token in self._model.spec.eos_token_ids and not ignore_eos:
                self.finish_reason = "eos"
                break
            if piece := text.push(token):
                yield piece
            if text.stopped:
                self.finish_reason = "stop"
                return
        if self.finish_reason is None:
            self.finish_reason = "length"
        if rest := text.flush():
            yield rest

    def score(
        self, prompt: str | Sequence[int], progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Evaluates a prompt as `feed` does and says how likely each of its tokens was.

        Returns `[n]` float64: the natural log of each token's probability given what the session
        remembered before it. The first token of a session was predicted by nothing: NaN.
        """
        ids, last, scores = self._checked_ids(prompt), self._memory.hidden, []
        for step in self._memory.evaluate(ids, self.prefill_step):
            before = step.hidden if last is None else torch.cat((last, step.hidden))
            targets = self._memory.tokens[-step.hidden.shape[0] :]
            if last is None:
                scores.append(torch.full((1,), math.nan, dtype=torch.float64))
                targets = targets[1:]
            scores.append(self._memory.log_probabilities(before[: len(targets)], targets))
            last = step.hidden[-1:]
            if progress:
                progress(step.hidden.shape[0])
        return torch.cat(scores)

    def rewind(self, count: int) -> list[int]:
        """Takes the last `count` tokens back and returns them.

        `logits` are then those of the token before, evaluated anew over the cells still held. Cells
        that a window forgot do not come back: it is shorter until it fills again.

        Raises InvalidArgument for a negative count, and where the token to stand on is no longer
        held.
        """
        return self._memory.take_back(count)

    # Going on elsewhere

    def snapshot(self) -> Snapshot:
        """All that this session is now. Cheap: cells are shared until they would be overwritten."""
        memory = self._memory
        return Snapshot(
            fingerprint=asdict(self._model.fingerprint),
            model=self._model.name,
            policy={"name": memory.policy.name, **memory.policy.settings()},
            settings={
                "prefill_step": self.prefill_step,
                "keep_whole_prompt": self._keep_whole_prompt,
            },
            tokens=torch.tensor(memory.tokens, dtype=torch.int32),
            serials=torch.tensor(memory.serials, dtype=torch.int64),
            clock=self.cache.time,
            serial=self.cache.serial,
            segments=tuple(segment.twin() for segment in self.cache.segments),
            hidden=memory.hidden,
            logits=memory.logits(),
            sampler=self._sampler.state(),
            layout=self.cache.layout,
        )

    @classmethod
    def restore(
        cls, model: "Model", snapshot: Snapshot, store: PrefixStore | None = None
    ) -> "Session":
        """The session that a snapshot was taken of; see `Model.restore`."""
        model.fingerprint.require(snapshot.fingerprint, "the snapshot")
        policy, settings = make_policy(**snapshot.policy), snapshot.settings
        session = cls(model, policy, settings["prefill_step"], store)
        session._keep_whole_prompt = settings["keep_whole_prompt"]
        session._sampler = Sampler.at(snapshot.sampler)
        memory, device = session._memory, session.cache.layout.device
        memory.tokens.extend(snapshot.tokens.tolist())
        memory.serials.extend(snapshot.serials.tolist())
        memory.cache.time, memory.cache.serial = snapshot.clock, snapshot.serial
        memory.cache.segments = [segment.twin().to(device) for segment in snapshot.segments]
        memory.stand_at(snapshot.hidden, snapshot.logits)
        return session

    def fork(self, at: int | None = None) -> "Session":
        """A session that starts as this one is, or as it was after its first `at` tokens.

        Memory is shared: the fork's own tokens are all that it adds, but for a window that has
        begun to rotate, which whoever goes on first copies. Raises InvalidArgument where the
        tokens up to `at` are no longer held.
        """
        total = len(self._memory.tokens)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork at 0 to {total} tokens; found {at}")
        fork = copy.copy(self)
        fork._memory = self._memory.fork()
        fork._sampler = Sampler.at(self._sampler.state())
        if at is not None:
            fork.rewind(total - at)
        return fork

    # How

    def _checked_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self._text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        vocabulary = self._model.spec.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise InvalidArgument(
                    f"token ids must be 0 to {vocabulary - 1}; found {token} at index {index}"
                )
        self._memory.require_room(len(ids))
        if self._keep_whole_prompt:
            self.keep = len(ids)
        return ids

    def _reuse(self, store: PrefixStore, ids: list[int]) -> tuple[int, int | None]:
        """Takes what a store holds of the prompt, leaving one token to evaluate for its logits."""
        most = min(len(ids) - 1, self.max_kv_size)  # beyond the budget, cells would be forgotten
        found = store.find(self._model.fingerprint, ids[:most])
        if found.tokens:
            keys, values = torch.cat(found.keys, 2), torch.cat(found.values, 2)
            self._memory.adopt(ids[: found.tokens], keys, values)
        return found.tokens, found.differs_at

    def _keep_blocks(self, store: PrefixStore, stored: int) -> int:
        """Gives a store the whole blocks that are new, while nothing was forgotten yet."""
        tokens = self._memory.tokens
        if len(tokens) != self.cache.cells:
            return stored
        while stored + BLOCK <= len(tokens):
            cells = Cells.joined([part for _, part in self.cache.read(stored, BLOCK)])
            stored += BLOCK
            store.add(self._model.fingerprint, tokens[:stored], cells.keys, cells.values)
        return stored
