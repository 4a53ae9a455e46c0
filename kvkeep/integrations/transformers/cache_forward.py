"""The sessions of a batch, and one forward of a transformers model that appends to them."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from torch import Tensor
from transformers import Cache

from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers.executor import TransformersExecutor
from kvkeep.integrations.transformers.interface import use_backend
from kvkeep.integrations.transformers.step_runner import StepRunner
from kvkeep.runtime.worker import compute_lock
from kvkeep.session.external_step import ExternalStep
from kvkeep.session.session import Session


class SessionBatch(Cache):
    """The part of a `KvkeepCache` that its forwards use: a session for each row of a batch.

    padding: for each row, how many of its columns were padding.
    """

    def __init__(self, executor: TransformersExecutor, session: Session):
        """session: the only row."""
        super().__init__(layers=[])
        self.executor = executor
        self._sessions: tuple[Session, ...] = (session,)
        self.padding = [0]
        self.unfinished_forward: CacheForward | None = None
        self._empty_session = session.fork()  # forked for each new row
        self._empty_session.rewind(len(session.tokens))

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The session of each row, without the tokens of an unfinished forward."""
        forward = self.unfinished_forward
        if forward is not None and forward.is_in_this_thread:
            forward.rollback()  # an exception ended it, and torch did not run its hooks
        elif forward is not None:
            with compute_lock():  # wait until the forward of another thread is done
                pass
        return self._sessions

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns evaluated so far, padding included."""
        return self.padding[0] + len(self.sessions[0].tokens)

    def resize(self, num_rows: int) -> None:
        """Change the number of rows of a batch without tokens.

        Raises InvalidArgument if it has tokens, or if rows have different numbers of columns.
        """
        if num_rows != len(self.sessions):
            if any(session.tokens for session in self.sessions):
                raise InvalidArgument(
                    f"the cache has {len(self.sessions)} rows; found a batch of {num_rows}"
                )
            self._sessions = tuple(self._empty_session.fork() for _ in range(num_rows))
            self.padding = [0] * num_rows
        column_counts = {
            padding + len(session.tokens)
            for padding, session in zip(self.padding, self.sessions, strict=True)
        }
        if len(column_counts) > 1:
            raise InvalidArgument(
                "the rows of a batch must change together: their sessions now hold different "
                "numbers of tokens and padding"
            )

    def select(self, rows: Sequence[int]) -> None:
        """Replace the batch by these of its rows. Forks a row that occurs several times."""
        last_use = {row: index for index, row in enumerate(rows)}
        selected = [
            self.sessions[row] if last_use[row] == index else self.sessions[row].fork()
            for index, row in enumerate(rows)
        ]
        self._sessions, self.padding = tuple(selected), [self.padding[row] for row in rows]

    def reset(self) -> None:
        """Remove all tokens and return to a batch of one."""
        self._sessions, self.padding = (self._empty_session.fork(),), [0]

    def fork(self) -> Self:
        """Return a cache with the same state, which shares cells until either side changes them."""
        sessions, fork = tuple(session.fork() for session in self.sessions), shallow_copy(self)
        fork._sessions, fork.padding = sessions, list(self.padding)
        return fork


class CacheForward:
    """One forward that appends to a batch of sessions.

    batch: the cache that the caller passed to the model. step_cache: the cache that its layers get
    instead. tokens: the ids of the last step; the model's forward evaluates it, and kvkeep those
    before. is_finished: whether the forward was committed or rolled back.
    """

    def __init__(self, batch: SessionBatch, ids: Tensor, mask: Tensor | None):
        """ids: `[rows, n]`. mask: `[rows, past columns + n]`."""
        self.batch, self._ids_shape = batch, ids.shape
        self._thread_id, self.is_finished = threading.get_ident(), False
        self._token_columns = _find_token_columns(batch, ids, mask)
        row_tokens = [
            [row[column] for column in columns]
            for row, columns in zip(ids.tolist(), self._token_columns, strict=True)
        ]
        rows = self._active_rows = [i for i, tokens in enumerate(row_tokens) if tokens]
        if not rows:
            raise InvalidArgument("attention_mask masks every token of this forward")
        sessions, executor = batch.sessions, batch.executor
        self._step = ExternalStep(
            [sessions[row] for row in rows], [row_tokens[row] for row in rows]
        )
        self.tokens = self._step.tokens
        self._backend_context = ExitStack()
        try:
            self._runner = StepRunner(executor.facts, self._step.step, executor.configs[0])
            self.step_cache = self._runner.cache
            self.step_cache.cache_forward = self
            self._backend_context.enter_context(use_backend(self._runner, executor.configs))
        except BaseException:
            self.rollback()
            raise
        batch.unfinished_forward = self

    @property
    def is_in_this_thread(self) -> bool:
        return self._thread_id == threading.get_ident()

    def rollback(self) -> None:
        """Leave all rows as they were."""
        self.batch.unfinished_forward, self.is_finished = None, True
        self._backend_context.close()
        self._step.rollback()

    def commit(self, hidden: Tensor) -> Tensor:
        """Append the tokens to the sessions; return all columns' hidden states.

        hidden: the model's hidden states of `tokens`. Returns `[rows, n, hidden_size]`. If it
        raises anything but KeyboardInterrupt at its end, the rows are as they were.
        """
        try:
            self._backend_context.close()
            self._runner.finish()
            row_hidden = self._step.finish(hidden.flatten(0, 1))
            all_hidden = self._insert_padding(row_hidden)
        except BaseException:
            self.rollback()
            raise
        self.batch.unfinished_forward, self.is_finished = None, True
        self.batch.padding = [
            padding + self._ids_shape[1] - len(columns)
            for padding, columns in zip(self.batch.padding, self._token_columns, strict=True)
        ]
        self._step.commit()
        return all_hidden

    def _insert_padding(self, row_hidden: Sequence[Tensor]) -> Tensor:
        """Scatter the hidden states of each row's tokens to their columns; padding is 0."""
        first, (num_rows, n) = row_hidden[0], self._ids_shape
        if num_rows == 1 and len(first) == n:
            return first.clone().unsqueeze(0)
        all_hidden = first.new_zeros(num_rows, n, first.shape[-1])
        for row, hidden in zip(self._active_rows, row_hidden, strict=True):
            all_hidden[row, self._token_columns[row]] = hidden
        return all_hidden


def _find_token_columns(batch: SessionBatch, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the columns of each row that are tokens, not padding.

    Raises InvalidArgument if the mask differs from the batch in past columns.
    """
    num_rows, n = ids.shape
    past_columns = batch.get_seq_length()
    if mask is None and any(batch.padding):
        raise InvalidArgument(
            "this cache has evaluated padding: pass an attention_mask that marks the padding, or "
            "call cache.drop_padding() if no more padding follows"
        )
    if mask is None:
        return [list(range(n))] * num_rows
    if mask.shape != (num_rows, past_columns + n):
        raise InvalidArgument(
            f"attention_mask must cover the {past_columns} tokens in the cache and these {n}, "
            f"[{num_rows}, {past_columns + n}]; found {list(mask.shape)}"
        )
    mask = mask.bool()
    actual = mask[:, :past_columns].sum(1).tolist()
    expected = [past_columns - padding for padding in batch.padding]
    if actual != expected:
        raise InvalidArgument(
            "attention_mask must be 1 for the tokens in the cache and 0 for padding: expected "
            f"{expected} ones in the first {past_columns} columns of each row, found {actual}"
        )
    new_columns = mask[:, past_columns:].tolist()
    return [[column for column, is_token in enumerate(row) if is_token] for row in new_columns]
