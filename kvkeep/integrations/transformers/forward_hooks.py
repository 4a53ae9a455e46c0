"""A forward of a model of transformers into a cache of ours: hooks before and after its layers."""

import inspect
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from kvkeep.errors import InvalidArgument, UnsupportedModel
from kvkeep.integrations.transformers.interface import attended_by
from kvkeep.integrations.transformers.layers import Adapted
from kvkeep.integrations.transformers.step_cache import StepCache
from kvkeep.integrations.transformers.step_runner import Stepping
from kvkeep.session.external_step import ExternalStep
from kvkeep.session.session import Session

_READ = {"input_ids", "attention_mask", "position_ids", "past_key_values"}
_NOTHING_NEW = {"use_cache", "cache_position", "return_dict", "logits_to_keep"}
# What `generate` was called with to choose tokens by, and hands on to every forward.
_FOR_GENERATE = {"tokenizer", "assistant_tokenizer", "assistant_model", "streamer", "synced_gpus"}


def hook_body(body: nn.Module) -> list[RemovableHandle]:
    """Has the model's layers read into our cache where they are handed one."""
    reads = _Reads(inspect.signature(body.forward))
    return [
        body.register_forward_pre_hook(reads.begin, with_kwargs=True),
        body.register_forward_hook(reads.end, with_kwargs=True, always_call=True),
    ]


class Computes(Protocol):
    """A model that was looked at. body: below its head."""

    model: nn.Module
    body: nn.Module
    adapted: Adapted
    configs: list[PreTrainedConfig]

    def require_not_moved(self) -> None:
        """Raises InvalidArgument where the model has another dtype or device than it had."""


class Rows(Protocol):
    """A cache of ours, as a forward sees it: sessions, one for each row of a batch; `KvkeepCache`.

    padding: of each row, how many columns were none of its tokens. reading: the forward that is
    under way.
    """

    padding: list[int]
    reading: "Reading | None"

    @property
    def executor(self) -> Computes:
        """Of the model that it was made for."""

    def sessions_for(self, rows: int) -> tuple[Session, ...]:
        """Raises InvalidArgument where there is another number of them."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that were read."""

    def read(self, columns: int, tokens: Sequence[int]) -> None:
        """So many columns were given, and so many of them were tokens of each row."""


class Reading:
    """One forward: which tokens go to which session, and the step that takes them."""

    def __init__(self, cache: Rows, sessions: Sequence[Session], ids: Tensor, mask: Tensor | None):
        """sessions: of all rows. ids: `[batch, n]`. mask: `[batch, all tokens so far and these]`,
        or None.
        """
        self.cache, self.shape = cache, ids.shape
        self._thread, self.over = threading.get_ident(), False
        self.columns = _columns(cache, ids, mask)
        rows = ids.tolist()
        given = [[row[i] for i in own] for row, own in zip(rows, self.columns, strict=True)]
        self.rows = [index for index, own in enumerate(given) if own]
        if not self.rows:
            raise InvalidArgument("attention_mask hides every token of this forward")
        executor = cache.executor
        self._step = ExternalStep([sessions[i] for i in self.rows], [given[i] for i in self.rows])
        self._open = ExitStack()
        try:
            self.stepping = Stepping(executor.adapted, self._step.step)
            self.handed = self.stepping.cache(executor.configs[0])
            self.handed.reading = self
            self._open.enter_context(attended_by(self.stepping, executor.configs))
        except BaseException:
            self.rollback()
            raise

    @property
    def tokens(self) -> Tensor:
        """What the model is to evaluate now, the last of it all."""
        return self._step.tokens

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def rollback(self) -> None:
        """Leaves all rows as they were."""
        self.cache.reading, self.over = None, True
        self._open.close()
        self._step.rollback()

    def keep(self, hidden: Tensor) -> Tensor:
        """hidden: what the model made of `tokens`. Returns `[batch, n, hidden_size]`, of all.

        Whatever it raises, but for KeyboardInterrupt at its end, the rows are as they were.
        """
        try:
            self._open.close()
            self.stepping.finish(self.handed)
            found = self._step.finish(hidden[0] if len(self.rows) == 1 else hidden[:, 0])
            whole: Tensor = self._whole(found)
        except BaseException:
            self.rollback()
            raise
        self.cache.reading, self.over = None, True
        self.cache.read(self.shape[1], [len(own) for own in self.columns])
        self._step.commit()
        return whole

    def _whole(self, found: Sequence[Tensor]) -> Tensor:
        """The hidden states of tokens, where these were; 0 where there was padding."""
        if len(found) == len(self.columns) == 1 and len(found[0]) == self.shape[1]:
            return found[0].clone().unsqueeze(0)
        first = found[0]
        shape = (*self.shape, first.shape[-1])
        whole = torch.zeros(shape, dtype=first.dtype, device=first.device)
        for row, states in zip(self.rows, found, strict=True):
            whole[row, self.columns[row]] = states
        return whole


def _columns(cache: Rows, ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Which columns of each row are tokens, and no padding."""
    batch, n = ids.shape
    before = cache.get_seq_length()
    if mask is None and any(cache.padding):
        raise InvalidArgument(
            "this cache has read padding: attention_mask must say which tokens are none, or "
            "cache.drop_padding() that from now on tokens alone are given"
        )
    if mask is None:
        return [list(range(n))] * batch
    if mask.shape != (batch, before + n):
        raise InvalidArgument(
            f"attention_mask must be of the {before} tokens in the cache and these {n}, "
            f"[{batch}, {before + n}]; found {list(mask.shape)}"
        )
    mask = mask.bool()
    held = mask[:, :before].sum(1).tolist()
    known = [before - padding for padding in cache.padding]
    if held != known:
        raise InvalidArgument(
            f"attention_mask must be 1 for the tokens that the cache has read, and 0 for padding: "
            f"expected {known} of the first {before} in each row, found {held}"
        )
    new = mask[:, before:].tolist()
    return [[column for column, there in enumerate(row) if there] for row in new]


class _Reads:
    """The two hooks of one model."""

    def __init__(self, signature: inspect.Signature):
        self._signature = signature

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the layers: hands them the last step of what comes, instead of all of it."""
        given: dict[str, Any] = dict(kwargs)
        if args:
            given = self._signature.bind(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
        cache: Any = given.get("past_key_values")
        if not hasattr(cache, "sessions_for"):
            return None
        if cache.executor.body is not module:
            raise InvalidArgument("this cache was made for another model")
        cache.executor.require_not_moved()
        _check_gradients(cache.executor.model, given)
        _check(given, cache.executor.configs[0])
        ids, mask = given["input_ids"], given.get("attention_mask")
        sessions = cache.sessions_for(len(ids))
        _check_positions(cache, ids, mask, given.get("position_ids"))
        cache.reading = reading = Reading(cache, sessions, ids, mask)
        return (), {
            "input_ids": reading.tokens,
            "past_key_values": reading.handed,
            "use_cache": True,
            "return_dict": True,
        }

    def end(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After the layers, also where they failed: the sessions have all of it, or nothing."""
        handed = kwargs.get("past_key_values")
        reading: Reading | None = handed.reading if isinstance(handed, StepCache) else None
        if reading is None or not isinstance(handed, StepCache):
            return None
        handed.reading = None
        if reading.over:
            raise InvalidArgument("a KvkeepCache was used within a forward of its own")
        if output is None:
            reading.rollback()
            return None
        output["last_hidden_state"] = reading.keep(output.last_hidden_state)
        output["past_key_values"] = reading.cache
        return output


def _check_gradients(model: nn.Module, given: dict[str, Any]) -> None:
    """Raises InvalidArgument where a caller could take a gradient of what the forward gives."""
    if not torch.is_grad_enabled():
        return
    inputs = (each for each in given.values() if isinstance(each, Tensor))
    if any(each.requires_grad for each in (*model.parameters(), *inputs)):
        raise InvalidArgument(
            "a forward into a KvkeepCache has no gradients, and gradients are enabled: call the "
            "model under torch.no_grad() or torch.inference_mode(), or train without a KvkeepCache"
        )


def _check(given: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raises where a forward is asked for what it cannot do with our cache."""
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        raise InvalidArgument(
            "a forward into a KvkeepCache takes input_ids, [batch, n] with n at least 1: what has "
            "no token ids (inputs_embeds, images) cannot be listed, edited or saved"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise InvalidArgument(
            "attention_mask must say of each token whether it is there, [batch, tokens]: a mask of "
            "another shape is for the model's own attention"
        )
    if given.get("return_dict") is False:
        raise InvalidArgument("return_dict=False is not for a forward into a KvkeepCache")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedModel(
                f"the model's config asks for {name}, which there is none of in a forward into a "
                "KvkeepCache: set it to False"
            )
    others = [
        name
        for name, value in given.items()
        if name not in _READ | _NOTHING_NEW | _FOR_GENERATE
        and value is not None
        and value is not False
        and not _all_text(name, value)
    ]
    if others:
        raise UnsupportedModel(
            f"a forward into a KvkeepCache takes no {', '.join(sorted(others))}: its attention is "
            "kvkeep's, and its input is text"
        )


def _all_text(name: str, value: object) -> bool:
    """Whether it says of each token that it is text, as tokenizers of models that see do."""
    return name.endswith("token_type_ids") and isinstance(value, Tensor) and not value.any()


def _check_positions(
    cache: Rows, ids: Tensor, mask: Tensor | None, positions: Tensor | None
) -> None:
    """Raises where positions are given that are not those which tokens have here.

    They may count padding or not: distances are the same.
    """
    if positions is None:
        return
    positions = positions[0] if positions.dim() == 3 else positions
    n, before = ids.shape[1], cache.get_seq_length()
    positions = positions[:, -n:].expand(len(ids), -1)
    for row, places in enumerate(positions):
        there = None if mask is None else mask[row, -n:].bool()
        own = places if there is None else places[there]
        if not len(own):
            continue
        held, last = before - cache.padding[row], int(own[-1])
        column = n - 1 if there is None else int(there.nonzero()[-1])
        if last not in (held + len(own) - 1, before + column) or bool((own.diff() != 1).any()):
            raise InvalidArgument(
                f"position_ids say that token {held + len(own) - 1} of row {row} is at {last}: a "
                "KvkeepCache counts from the first token on, one by one, with padding or without, "
                "and generate must be called with use_cache=True"
            )
