"""The sessions of a batch, and one forward of a transformers model that appends to them."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import Cache

from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers.executor import TransformersExecutor
from kvkeep.integrations.transformers.interface import use_backend
from kvkeep.integrations.transformers.step_runner import StepRunner
from kvkeep.runtime.worker import compute_lock
from kvkeep.session.external_step import ExternalStep
from kvkeep.session.session import Session


class BatchSessions:
    """The sessions of a batch, one for each row.

    executor: of the model that they were made for. empty: a session without tokens, of which new
    rows are forks. padding: for each row, how many of its columns were padding. forward: the
    forward under way, or None.
    """

    def __init__(
        self,
        executor: TransformersExecutor,
        empty: Session,
        sessions: Sequence[Session],
        padding: Sequence[int] = (0,),
    ):
        self.executor = executor
        self._empty = empty
        self._sessions = tuple(sessions)
        self.padding = list(padding)
        self.forward: CacheForward | None = None

    @classmethod
    def of_one(cls, executor: TransformersExecutor, session: Session) -> "BatchSessions":
        """Return a batch with this session as its only row."""
        empty = session.fork()
        empty.rewind(len(session.tokens))
        return cls(executor, empty, [session])

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions, without the tokens of an unfinished forward."""
        if self.forward is not None and self.forward.is_of_this_thread:
            self.forward.rollback()  # it was left by an exception for which torch runs no hooks
        elif self.forward is not None:
            with compute_lock():  # wait until the forward of another thread is done
                pass
        return self._sessions

    @property
    def columns(self) -> int:
        """The number of columns evaluated so far, padding included."""
        return self.padding[0] + len(self.sessions[0].tokens)

    def resize(self, rows: int) -> None:
        """Replace the sessions by `rows` empty ones if there is another number of them.

        Raises InvalidArgument if they hold tokens, or if rows hold different numbers of columns.
        """
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

    def add_padding(self, columns: int, tokens: Sequence[int]) -> None:
        """Count the padding of a forward of `columns` columns with so many tokens in each row."""
        self.padding = [
            padding + columns - count for padding, count in zip(self.padding, tokens, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Replace the batch by these rows of it; a row that occurs several times is forked."""
        last_use = {row: index for index, row in enumerate(rows)}
        selected = [
            self.sessions[row] if last_use[row] == index else self.sessions[row].fork()
            for index, row in enumerate(rows)
        ]
        self._sessions, self.padding = tuple(selected), [self.padding[row] for row in rows]

    def reset(self) -> None:
        """Return to a batch of one without tokens."""
        self._sessions, self.padding = (self._empty.fork(),), [0]

    def fork(self) -> "BatchSessions":
        """Return a batch of forks of the sessions."""
        sessions = [session.fork() for session in self.sessions]
        return BatchSessions(self.executor, self._empty, sessions, self.padding)


class CacheForward:
    """One forward into a batch of sessions: the tokens of each row, and the step that takes them.

    cache: the cache that the caller passed to the model. tokens: those that the model evaluates
    itself, the last step. step_cache: the cache that its layers get instead. is_over: whether it
    was committed or rolled back.
    """

    def __init__(self, cache: Cache, batch: BatchSessions, ids: Tensor, mask: Tensor | None):
        """ids: `[rows, n]`. mask: `[rows, all columns so far and these]`, or None."""
        self.cache, self._batch, self._shape = cache, batch, ids.shape
        self._thread, self.is_over = threading.get_ident(), False
        self._columns = _token_columns(batch, ids, mask)
        row_ids = ids.tolist()
        row_tokens = [
            [row[column] for column in columns]
            for row, columns in zip(row_ids, self._columns, strict=True)
        ]
        self._rows = [row for row, tokens in enumerate(row_tokens) if tokens]
        if not self._rows:
            raise InvalidArgument("attention_mask hides every token of this forward")
        sessions, executor = batch.sessions, batch.executor
        self._step = ExternalStep(
            [sessions[row] for row in self._rows], [row_tokens[row] for row in self._rows]
        )
        self._backend = ExitStack()
        try:
            self._runner = StepRunner(executor.adapted, self._step.step, executor.configs[0])
            self.step_cache = self._runner.cache
            self.step_cache.forward = self
            self._backend.enter_context(use_backend(self._runner, executor.configs))
        except BaseException:
            self.rollback()
            raise
        batch.forward = self

    @property
    def tokens(self) -> Tensor:
        return self._step.tokens

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def rollback(self) -> None:
        """Leave all rows as they were."""
        self._batch.forward, self.is_over = None, True
        self._backend.close()
        self._step.rollback()

    def commit(self, hidden: Tensor) -> Tensor:
        """Append the tokens to the sessions. hidden: the model's hidden states of `tokens`.

        Returns the hidden states of all columns, `[rows, n, hidden_size]`. If it raises anything
        but KeyboardInterrupt at its end, the rows are as they were.
        """
        try:
            self._backend.close()
            self._runner.finish()
            row_hidden = self._step.finish(hidden.flatten(0, 1))
            all_hidden: Tensor = self._with_padding(row_hidden)
        except BaseException:
            self.rollback()
            raise
        self._batch.forward, self.is_over = None, True
        self._batch.add_padding(self._shape[1], [len(columns) for columns in self._columns])
        self._step.commit()
        return all_hidden

    def _with_padding(self, row_hidden: Sequence[Tensor]) -> Tensor:
        """Scatter the hidden states of each row's tokens to their columns; padding is 0."""
        first = row_hidden[0]
        if len(row_hidden) == len(self._columns) == 1 and len(first) == self._shape[1]:
            return first.clone().unsqueeze(0)
        shape = (*self._shape, first.shape[-1])
        all_hidden = torch.zeros(shape, dtype=first.dtype, device=first.device)
        for row, hidden in zip(self._rows, row_hidden, strict=True):
            all_hidden[row, self._columns[row]] = hidden
        return all_hidden


def _token_columns(batch: BatchSessions, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the columns of each row that are tokens and not padding.

    Raises InvalidArgument if the mask contradicts the columns that were evaluated before.
    """
    rows, n = ids.shape
    past = batch.columns
    if mask is None and any(batch.padding):
        raise InvalidArgument(
            "this cache has evaluated padding: give an attention_mask that says which tokens are "
            "padding, or call cache.drop_padding() if only tokens are given from now on"
        )
    if mask is None:
        return [list(range(n))] * rows
    if mask.shape != (rows, past + n):
        raise InvalidArgument(
            f"attention_mask must be of the {past} tokens in the cache and these {n}, "
            f"[{rows}, {past + n}]; found {list(mask.shape)}"
        )
    mask = mask.bool()
    masked_in = mask[:, :past].sum(1).tolist()
    evaluated = [past - padding for padding in batch.padding]
    if masked_in != evaluated:
        raise InvalidArgument(
            "attention_mask must be 1 for the tokens in the cache, and 0 for padding: "
            f"expected {evaluated} of the first {past} in each row, found {masked_in}"
        )
    new = mask[:, past:].tolist()
    return [[column for column, is_token in enumerate(row) if is_token] for row in new]
