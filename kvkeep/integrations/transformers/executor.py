"""The executor that runs kvkeep's steps by a transformers model, and a check of its results."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from kvkeep.cache.group_step import GroupStep
from kvkeep.errors import InvalidArgument, UnsupportedModel
from kvkeep.integrations.transformers.adapter import attention_facts
from kvkeep.integrations.transformers.interface import (
    body_name,
    body_of,
    configs_of,
    hook_rotary_embeddings,
    use_backend,
)
from kvkeep.integrations.transformers.step_runner import StepRunner
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.primitives import require_finite
from kvkeep.policies import Full
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory

_CHECK_LENGTHS = (7, 1, 4)  # tokens that `require_agreement` evaluates at once
# The largest difference of hidden states relative to their norm, in float32 and in shorter dtypes.
# Any difference but rounding is about as large as the norm.
_FLOAT32_TOLERANCE, _REDUCED_PRECISION_TOLERANCE = 1e-3, 0.15
_Module = TypeVar("_Module", bound=nn.Module)


class TransformersExecutor:
    """Runs each step by the model's own forward, in which kvkeep computes the attention.

    Raises UnsupportedModel, naming the reason, for a model that `attention_facts` does not accept.
    Methods raise InvalidArgument after the model was moved to another dtype or device.

    body: see `body_of`. configs: see `configs_of`. hook_handles: of all hooks on the model.
    """

    name = "transformers"
    row_limit = 0
    rounding = ""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.body: nn.Module = body_of(model)
        self.configs = configs_of(model)
        self.hook_handles: list[RemovableHandle] = hook_rotary_embeddings(self.body)
        self._probed_identity = _model_identity(model)
        try:
            self.facts = attention_facts(model, self.configs)
            self._head = OutputHead(model)
        except BaseException:
            self.unhook()
            raise

    def is_current(self) -> bool:
        """Whether the model has the modules, dtype and device that it had when it was probed."""
        return _model_identity(self.model) == self._probed_identity

    def require_not_moved(self) -> None:
        """Raise InvalidArgument if the model's dtype or device has changed since its probe."""
        current, probed = _dtype_and_device(self.model), self._probed_identity[:2]
        if current != probed:
            raise InvalidArgument(
                f"the model was in {_format_placement(probed)} when kvkeep loaded it, and is in "
                f"{_format_placement(current)} now; its caches and sessions cannot be used: move "
                "the model back, or create them again"
            )

    def unhook(self) -> None:
        """Remove all hooks from the model."""
        while self.hook_handles:
            self.hook_handles.pop().remove()

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Return the final hidden states of a step, `[tokens, hidden_size]`."""
        self.require_not_moved()
        rows = len(step.steps) if isinstance(step, GroupStep) else 1
        runner = StepRunner(self.facts, step, self.configs[0])
        recording = nullcontext() if input_norms is None else self._record_norms(input_norms)
        with recording, use_backend(runner, self.configs), torch.inference_mode():
            ids = tokens.view(rows, -1)
            output = self.body(input_ids=ids, past_key_values=runner.cache, use_cache=True)
            runner.finish()
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)

    @contextmanager
    def _record_norms(self, input_norms: Tensor) -> Iterator[None]:
        """Write the norm of each token's input to each layer to `input_norms[layer]`."""
        names = {module: name for name, module in self.body.named_modules()}

        def record(index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
            layer_input = args[0] if args else kwargs["hidden_states"]  # [1, n, hidden]
            input_norms[index] = layer_input[0].float().norm(dim=-1)

        with ExitStack() as hooks:
            for index, call in enumerate(self.facts.calls):
                layer_name = names[call.module].rpartition(".")[0]  # attention lies in the layer
                layer = self.body.get_submodule(layer_name)
                hook = partial(record, index)
                handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def logits(self, hidden: Tensor) -> Tensor:
        self.require_not_moved()
        return require_finite(self._head.logits(hidden))

    def unpack_matrix(self, name: str) -> Tensor:
        """Raise InvalidArgument; other executors return a matrix by kvkeep's name of it."""
        raise InvalidArgument(
            f"this needs {name}, and kvkeep does not know which weights of "
            f"{type(self.model).__name__} those are: use another method"
        )


@torch.inference_mode()
def require_agreement(model: PreTrainedModel, decoder: Decoder) -> None:
    """Raise UnsupportedModel if kvkeep computes other hidden states or logits than the model."""
    # Any tokens, spread over the vocabulary.
    ids = [(7_919 * index + 3) % decoder.spec.vocab_size for index in range(sum(_CHECK_LENGTHS))]
    input_ids = torch.tensor([ids], dtype=torch.int64, device=model.device)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    output = model(input_ids=input_ids, past_key_values=caches[0], use_cache=True)
    body_output = body_of(model)(input_ids=input_ids, past_key_values=caches[1], use_cache=True)
    expected = body_output.last_hidden_state[0]
    memory, begin = Memory(decoder, Full(2 * len(ids))), 0
    for count in _CHECK_LENGTHS:
        (result,) = evaluate(memory, ids[begin : begin + count], count)
        subject = f"its layers for {count} tokens after {begin}"
        _require_close(result.hidden, expected[begin : begin + count], expected.dtype, subject)
        begin += count
    logits = decoder.logits(expected)
    _require_close(logits, output.logits[0], expected.dtype, "its head")


def _require_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, subject: str) -> None:
    """Raise UnsupportedModel if vectors, `[tokens, width]`, differ in the median over tokens.

    The median, since rounding may route single tokens to other experts. dtype: of the model.
    """
    actual, expected = actual.float(), expected.float()
    relative = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    difference = float(relative.median())
    tolerance = _FLOAT32_TOLERANCE if dtype is torch.float32 else _REDUCED_PRECISION_TOLERANCE
    if not difference <= tolerance:  # true for NaN as well
        raise UnsupportedModel(
            f"with kvkeep's cache, the output of {subject} differs by {difference:.1%} from that "
            "with the model's own cache; use a cache of transformers with it"
        )


class OutputHead:
    """The model's head, with all that its forward does before and after the head.

    Runs a shallow copy of the model, with the same weights, whose body returns given hidden states.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = _without_hooks(model)
        self._body = _without_hooks(body_of(model))
        self._model.__dict__["_modules"] = {**model._modules, body_name(model): self._body}

    def logits(self, hidden: Tensor) -> Tensor:
        """Convert hidden states, `[n, hidden_size]`, to logits, `[n, vocab]`, float32."""
        output = _BodyOutput(hidden.unsqueeze(0))
        self._body.__dict__["forward"] = lambda *args, **kwargs: output
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            with torch.inference_mode():
                logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            del self._body.__dict__["forward"]  # which holds the hidden states
        return logits[0].float()


def _without_hooks(module: _Module) -> _Module:
    """Return a shallow copy of a module that has none of its hooks."""
    module_copy = copy.copy(module)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            module_copy.__dict__[name] = type(value)()
    return module_copy


class _BodyOutput:
    """The output of a body. All fields but the hidden states are None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _model_identity(model: PreTrainedModel) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    """Return the model's dtype, device and modules. If they change, it must be probed again."""
    return *_dtype_and_device(model), tuple(map(id, model.modules()))


def _dtype_and_device(model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    parameter = next(model.parameters())
    return parameter.dtype, parameter.device


def _format_placement(dtype_and_device: tuple[torch.dtype, torch.device]) -> str:
    dtype, device = dtype_and_device
    return f"{str(dtype).removeprefix('torch.')} on {device}"
