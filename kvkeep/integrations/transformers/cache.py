"""A cache for transformers' `generate` and forwards: each row of a batch is a session of kvkeep."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, Unpack

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.plan import CompressionReport
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers.executor import TransformersExecutor
from kvkeep.integrations.transformers.forward_hooks import Reading
from kvkeep.integrations.transformers.model import TransformersModel, from_transformers
from kvkeep.policies import Policy, PolicySettings
from kvkeep.runtime.worker import computing
from kvkeep.session.editing import EditReport, Recompute
from kvkeep.session.history import History
from kvkeep.session.session import Session
from kvkeep.session.spans import Span
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import KvBits, PolicyName


class KvkeepCache(Cache):
    """A bounded, durable and editable memory in the place of transformers' `DynamicCache`.

        cache = KvkeepCache(model, max_kv_size=512)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=5_000)

    Given as `past_key_values` to the model that it was made for: to `generate`, in whatever way
    that decodes, or to a forward. It has read tokens, `input_ids` that `generate` need not read
    again; what it still holds of them is for its policy to say. A forward that fails leaves it as
    it was. Nothing is differentiable through it: call the model under `torch.no_grad()`, as
    `generate` does. `copy.copy` and `copy.deepcopy` fork it; it cannot be pickled.

    Each row of a batch is a session of its own (`sessions`); what is said below of one session is
    for a batch of one.

    model: kvkeep's view of the model. padding: of each row, how many of the columns that it was
    given were none of its tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_kv_size: int | None = None,
        keep: int | None = None,
        policy: PolicyName | Policy = "sliding",
        prefill_step: int = 512,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        bits: Bits | None = None,
        kv_bits: KvBits | None = None,
        far_bits: KvBits | None = None,
        calibration: Calibration | None = None,
        **settings: Unpack[PolicySettings],
    ):
        """model: of transformers, that writes text. tokenizer: as of `from_transformers`, for what
        is said in text (`insert`, `text`); the other arguments are those of `Model.session`.

        Raises UnsupportedModel, naming why, for a model whose cells kvkeep would not understand,
        and InvalidArgument as `Model.session`.
        """
        known = from_transformers(model, tokenizer)
        session = known.session(
            max_kv_size,
            keep,
            policy,
            prefill_step,
            bits=bits,
            kv_bits=kv_bits,
            far_bits=far_bits,
            calibration=calibration,
            **settings,
        )
        self._hold(known, session)

    def _hold(self, model: TransformersModel, session: Session) -> None:
        super().__init__(layers=[])
        self.model = model
        self._sessions: tuple[Session, ...] = (session,)
        self.padding: list[int] = [0]
        self.reading: Reading | None = None
        self._empty = session.fork()
        self._empty.rewind(len(session.tokens))

    @classmethod
    def load(
        cls,
        model: PreTrainedModel,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        calibration: Calibration | None = None,
    ) -> "KvkeepCache":
        """The cache that a snapshot in a file was taken of, in this process or another.

        Raises FingerprintMismatch, naming what differs, for a snapshot of another model, and
        StoreError and its kinds for a file that is not sound.
        """
        return cls.restore(model, Snapshot.load(path), tokenizer, calibration)

    @classmethod
    def restore(
        cls,
        model: PreTrainedModel,
        snapshot: Snapshot,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        calibration: Calibration | None = None,
    ) -> "KvkeepCache":
        """As `load`, of a snapshot in memory."""
        known = from_transformers(model, tokenizer)
        cache = cls.__new__(cls)
        cache._hold(known, known.restore(snapshot, calibration=calibration))
        return cache

    def __len__(self) -> int:
        """Layers that have cells."""
        return self.model.spec.layers

    def __repr__(self) -> str:
        return f"<KvkeepCache of {len(self.sessions)}: {self.sessions[0]!r}>"

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Of each row."""
        if self.reading is not None and self.reading.is_of_this_thread:
            self.reading.rollback()  # its forward was ended by what torch's hooks are not told of
        elif self.reading is not None:
            with computing():  # until that forward of another thread is through
                pass
        return self._sessions

    # As one session

    @property
    def session(self) -> Session:
        """The session of a batch of one. Raises InvalidArgument where there are more."""
        if len(self.sessions) != 1:
            raise InvalidArgument(
                f"this cache is of {len(self.sessions)} rows, each a session of its own: say which "
                "by cache.sessions[row]"
            )
        return self.sessions[0]

    @property
    def tokens(self) -> History:
        """Every token id so far, also those that the policy has forgotten."""
        return self.session.tokens

    @property
    def input_ids(self) -> Tensor:
        """The same as `generate` takes them, `[1, n]`: to be given with what comes next.

        Raises InvalidArgument where padding was read with them; see `drop_padding`.
        """
        if self.padding[0]:
            raise InvalidArgument(
                "padding was read with these tokens: give them to generate with their padding and "
                "attention_mask, or say cache.drop_padding() first"
            )
        device = self.model.decoder.new_cache().layout.device
        return torch.tensor([list(self.tokens)], dtype=torch.int64, device=device)

    @property
    def spans(self) -> dict[str, Span]:
        return self.session.spans

    @property
    def exactness(self) -> Exactness:
        """Of a restored cache, whether it goes on to the bit."""
        return self.session.exactness

    def snapshot(self) -> Snapshot:
        """As `Session.snapshot`: `cache.snapshot().save(path)`."""
        return self.session.snapshot()

    def fork(self) -> "KvkeepCache":
        """A cache that starts as this one is, and goes its own way; memory is shared."""
        fork = type(self).__new__(type(self))
        fork._hold(self.model, self._empty)
        fork._sessions = tuple(session.fork() for session in self.sessions)
        fork.padding = list(self.padding)
        return fork

    def __copy__(self) -> "KvkeepCache":
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> "KvkeepCache":
        """A fork, of the same model: transformers copies a cache so to share a prefix."""
        return self.fork()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            "a KvkeepCache cannot be pickled, as it belongs to a model in this process: save it "
            "with cache.snapshot().save(path), and load it with KvkeepCache.load(model, path)"
        )

    def pin(self, start: int | str, end: int | None = None) -> None:
        """As `Session.pin`."""
        self.session.pin(start, end)

    def unpin(self, start: int | str, end: int | None = None) -> None:
        """As `Session.unpin`."""
        self.session.unpin(start, end)

    def name(self, name: str, start: int, end: int) -> None:
        """As `Session.name`."""
        self.session.name(name, start, end)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """As `Session.span`."""
        with self.session.span(name):
            yield

    def delete(
        self, start: int | str, end: int | None = None, recompute: Recompute = "none"
    ) -> EditReport:
        """As `Session.delete`."""
        return self._edited(lambda session: session.delete(start, end, recompute))

    def insert(
        self,
        at: int,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """As `Session.insert`."""
        return self._edited(lambda session: session.insert(at, text, recompute, special))

    def replace(
        self,
        start: int | str,
        end: int | None,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """As `Session.replace`."""
        return self._edited(lambda session: session.replace(start, end, text, recompute, special))

    def drop_padding(self) -> None:
        """What comes next counts tokens alone, whatever padding was read before them."""
        self.padding = [0 for _ in (self.session,)]

    def rewind(self, count: int) -> list[int]:
        """As `Session.rewind`."""
        taken = self.session.rewind(count)
        self.padding = [0]
        return taken

    def compress(self, ratio: float = 2.0, **how: Any) -> CompressionReport:
        """As `Session.compress`."""
        return self.session.compress(ratio, **how)

    def _edited(self, edit: Callable[[Session], EditReport]) -> EditReport:
        report = edit(self.session)
        self.padding = [0]  # what comes next counts tokens alone
        return report

    # As transformers asks

    @property
    def executor(self) -> TransformersExecutor:
        return self.model.executor

    def sessions_for(self, rows: int) -> tuple[Session, ...]:
        """Those of a batch. Raises InvalidArgument where the cache is of another number."""
        if rows != len(self.sessions):
            if any(session.tokens for session in self.sessions):
                raise InvalidArgument(
                    f"the cache is of {len(self.sessions)} rows; found a batch of {rows}"
                )
            self._sessions = tuple(self._empty.fork() for _ in range(rows))
            self.padding = [0] * rows
        columns = {
            padding + len(session.tokens)
            for padding, session in zip(self.padding, self.sessions, strict=True)
        }
        if len(columns) > 1:
            raise InvalidArgument(
                "rows of one batch are changed together: their sessions now hold different "
                "numbers of tokens and padding"
            )
        return self.sessions

    def read(self, columns: int, tokens: Sequence[int]) -> None:
        """So many columns were given, and so many of them were tokens of each row."""
        self.padding = [
            padding + columns - count for padding, count in zip(self.padding, tokens, strict=True)
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were read, with padding: what `generate` need not give again."""
        return self.padding[0] + len(self.sessions[0].tokens)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it takes any number of tokens, or says in its error that it does not."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, *given: Any, **others: Any) -> tuple[Tensor, Tensor]:
        raise InvalidArgument(
            "layers do not write to a KvkeepCache: call the model that it was made for, or "
            "generate, with it as past_key_values"
        )

    @property
    def batch_size(self) -> int:
        return len(self.sessions)

    @property
    def is_initialized(self) -> bool:
        return bool(self.get_seq_length())

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back without a trace: while none was forgotten."""
        return all(
            session.core.memory.rewindable == len(session.tokens) for session in self.sessions
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last tokens back, a negative number of them, as assisted decoding does.

        Raises InvalidArgument where that would leave less than there was before they came: once
        tokens were forgotten for them, in a bounded cache that is full.
        """
        count = abs(validation.whole("tokens_to_remove", tokens_to_remove))
        if not count:
            return
        if tokens_to_remove > 0:
            raise InvalidArgument("crop takes a negative number: of tokens to take back")
        if not self.is_croppable:
            raise InvalidArgument(
                "the cache has forgotten tokens for those that are to be taken back, or keeps "
                "states of all of them: decode without an assistant, or with a larger max_kv_size"
            )
        for session in self.sessions:
            session.take_back(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search goes on from these rows; those of one row share its memory."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([row for row in range(len(self.sessions)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._choose(
            torch.arange(len(self.sessions), dtype=torch.int64, device="cpu")[
                indices.cpu()
            ].tolist()
        )

    def _choose(self, rows: Sequence[int]) -> None:
        last = {row: index for index, row in enumerate(rows)}
        chosen = [
            self.sessions[row] if last[row] == index else self.sessions[row].fork()
            for index, row in enumerate(rows)
        ]
        self._sessions, self.padding = tuple(chosen), [self.padding[row] for row in rows]

    def reset(self) -> None:
        """Forgets all."""
        self._sessions, self.padding = (self._empty.fork(),), [0]
