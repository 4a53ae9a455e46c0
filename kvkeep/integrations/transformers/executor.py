"""A model of transformers as the executor of kvkeep's steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import ChunkStep
from kvkeep.errors import InvalidArgument
from kvkeep.integrations.transformers.adapter import adapted
from kvkeep.integrations.transformers.forward_hooks import hook_body
from kvkeep.integrations.transformers.head import Head
from kvkeep.integrations.transformers.hooks import body_of, configs_of, hold_rotary
from kvkeep.integrations.transformers.interface import attended_by
from kvkeep.integrations.transformers.step_runner import Stepping
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import finite
from kvkeep.models.text.codec import TextCodec


class TransformersExecutor:
    """Every step by the model's own forward, in which kvkeep attends.

    Raises UnsupportedModel, naming the reason, for a model whose layers do something else with
    their cells than kvkeep would. Its methods raise InvalidArgument once the model was moved to
    another dtype or device.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.body: nn.Module = body_of(model)
        self.configs = configs_of(model)
        self.handles = [*hold_rotary(self.body), *hook_body(self.body)]
        self._made_for = _kind(model)
        self._texts: WeakKeyDictionary[
            PreTrainedTokenizerBase, tuple[int, TemporaryDirectory[str], TextCodec]
        ] = WeakKeyDictionary()
        try:
            self.adapted = adapted(model, self.configs)
            self._head = Head(model)
        except BaseException:
            self.unhook()
            raise

    def text_of(self, tokenizer: PreTrainedTokenizerBase) -> TextCodec:
        """As kvkeep reads it, from a folder that is there for as long as the tokenizer is."""
        size, known = len(tokenizer), self._texts.get(tokenizer)
        if known is None or known[0] != size:
            kept = TemporaryDirectory(prefix="kvkeep-tokenizer-")
            tokenizer.save_pretrained(kept.name)
            known = self._texts[tokenizer] = size, kept, TextCodec.open(Path(kept.name))
        return known[2]

    def is_as_it_was(self) -> bool:
        """Whether the model has the parts that were looked at, in that place and dtype."""
        return _kind(self.model) == self._made_for

    def require_not_moved(self) -> None:
        """Raises InvalidArgument where the model has another dtype or device than it had."""
        now, before = _place(self.model), self._made_for[:2]
        if now != before:
            raise InvalidArgument(
                f"the model was in {_in_words(before)} when it was given to kvkeep, and is in "
                f"{_in_words(now)} now, which the cells of its caches and sessions are not for: "
                "move it back, or make them again"
            )

    def unhook(self) -> None:
        """Takes every hook off the model."""
        while self.handles:
            self.handles.pop().remove()

    def __getstate__(self) -> dict[str, Any]:
        """All but the folders of tokenizers, for a model that is copied or pickled with it."""
        return {**vars(self), "_texts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._texts = WeakKeyDictionary()

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        self.require_not_moved()
        alone = isinstance(step, GroupStep)
        stepping = Stepping(self.adapted, step)
        cache = stepping.cache(self.configs[0])
        with attended_by(stepping, self.configs), torch.inference_mode():
            ids = tokens[:, None] if alone else tokens[None]
            found = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
            stepping.finish(cache)
        rows: Tensor = found.last_hidden_state
        return rows[:, 0] if alone else rows[0]

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            return self.hidden(tokens, step)
        with self._measuring(lengths):
            return self.hidden(tokens, step)

    @contextmanager
    def _measuring(self, lengths: Tensor) -> Iterator[None]:
        """Notes how long what each layer reads is: of the modules that attention is a part of."""
        names = {module: name for name, module in self.body.named_modules()}

        def note(index: int, *given: Any) -> None:
            _, args, kwargs = given
            read = args[0] if args else kwargs["hidden_states"]
            lengths[index] = read[0].float().norm(dim=-1)

        handles = [
            self.body.get_submodule(
                names[call.module].rpartition(".")[0]
            ).register_forward_pre_hook(partial(note, index), with_kwargs=True)
            for index, call in enumerate(self.adapted.calls)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, hidden: Tensor) -> Tensor:
        self.require_not_moved()
        return finite(self._head.logits(hidden))

    def unpacked(self, name: str) -> Tensor:
        raise InvalidArgument(
            f"this needs {name}, and kvkeep does not know which weights of "
            f"{type(self.model).__name__} these are: choose another method"
        )


def _kind(model: PreTrainedModel) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    """What is looked at anew where it is another: where weights are, and the parts that it has."""
    return *_place(model), tuple(map(id, model.modules()))


def _place(model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    first = next(model.parameters())
    return first.dtype, first.device


def _in_words(place: tuple[torch.dtype, torch.device]) -> str:
    dtype, device = place
    return f"{str(dtype).removeprefix('torch.')} on {device}"
