"""A model of transformers as a model of kvkeep."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
import transformers
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.errors import InvalidArgument, KvkeepError, UnsupportedModel
from kvkeep.executors import ComputePath
from kvkeep.integrations.transformers.executor import TransformersExecutor
from kvkeep.integrations.transformers.hooks import body_name
from kvkeep.integrations.transformers.self_check import require_agreement
from kvkeep.integrations.transformers.versions import require_version
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.tensors import NORM
from kvkeep.runtime.worker import computing
from kvkeep.storage.snapshots.fingerprint import Fingerprint, fingerprint, weights_digest

_OUTPUTS = ("o_proj", "out_proj", "dense")  # as models call what projects what attention found
_MINE = "_kvkeep_executor"  # the name of what kvkeep knows of a model, among its attributes
# What a config says of files and of this machine, and not of what a cell means.
_PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")


class TransformersModel(Model):
    """A model of kvkeep whose layers transformers computes; see `from_transformers`.

    executor: which hangs on the model of transformers. tokenizer: its own, where it came with one.
    """

    tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, name: str, folder: Path, executor: TransformersExecutor, text: TextCodec):
        self.executor = executor
        decoder = Decoder(executor.adapted.spec, _tensors(executor), executor=executor)
        super().__init__(name, folder, decoder, text)

    def __repr__(self) -> str:
        layout, model = self.decoder.new_cache().layout, self.executor.model
        numbers = sum(each.numel() for each in model.parameters())
        return (
            f"<{type(self).__name__} {self.name}: {self.spec.architecture} by transformers, "
            f"{self.spec.layers} layers with cells, {numbers / 1e6:,.1f} million weights in "
            f"{str(layout.dtype).removeprefix('torch.')} on {layout.device}>"
        )

    @cached_property
    def path(self) -> ComputePath:
        """transformers computes; kvkeep attends."""
        return ComputePath(
            "transformers", {"the compiled kernels": "are for kvkeep's own forwards"}
        )

    @property
    def arithmetic(self) -> dict[str, str]:
        """As `LoadedModel.arithmetic`."""
        threads = str(torch.get_num_threads())
        return super().arithmetic | {"transformers": transformers.__version__, "threads": threads}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """As `LoadedModel.fingerprint`; the config is the whole one of transformers."""
        config = self.executor.configs[0].to_dict()
        known = {name: value for name, value in config.items() if name not in _PASSING}
        said = json.dumps(known, sort_keys=True, default=str)
        layout = self.decoder.new_cache().layout
        return replace(
            fingerprint(self.spec, {}, self.text.tokenizer, layout),
            weights=weights_digest(self.decoder.tensors),
            config=blake3(said.encode()).hexdigest(),
        )


class _WithoutText(TextCodec):
    """Of a model that came without a tokenizer."""

    def encode(self, text: str, special: bool = False) -> list[int]:
        raise InvalidArgument(_NO_TOKENIZER)

    def encode_sealed(self, sealed: str) -> list[int]:
        raise InvalidArgument(_NO_TOKENIZER)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        raise InvalidArgument(_NO_TOKENIZER)


_WITHOUT = " cannot be run with kvkeep's memory: "
_NO_TOKENIZER = (
    "there is no tokenizer to make text of tokens or tokens of text: give token ids, or say "
    "tokenizer=... where the model is given to kvkeep"
)


def from_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    name: str | None = None,
) -> TransformersModel:
    """A model of transformers with all that kvkeep's own models have: sessions, policies, stores.

    Args:
        model: any of its models that write text (`AutoModelForCausalLM`), on any device and in any
            dtype; it computes as it does without kvkeep, but for its attention. What its layers
            attend with is looked at first, by forwards of one token. It stays usable by itself.
        tokenizer: the model's, or the folder where it is saved; None for sessions that are fed and
            give token ids alone.
        name: by which its snapshots call it; by default the one that it was loaded by.

    Raises:
        UnsupportedModel: naming why, for a model whose cells kvkeep would not understand.
        ImportError: for a version of transformers that kvkeep is not tested with.
    """
    require_version()
    executor = executor_of(model)
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    if tokenizer is None:
        text: TextCodec = _WithoutText(Path(), Tokenizer(BPE()))
        return TransformersModel(name, Path(), executor, text)
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        return TransformersModel(name, folder, executor, TextCodec.open(folder))
    codec = executor.text_of(tokenizer)
    found = TransformersModel(name, codec.folder, executor, codec)
    found.tokenizer = tokenizer  # the folder is there for as long as this is
    return found


def executor_of(model: PreTrainedModel) -> TransformersExecutor:
    """What was found out of a model; it is looked at once for each dtype and device."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(
            f"model must be a model of transformers; found {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder and a decoder; kvkeep keeps the memory of "
            "models that are a decoder alone"
        )
    body_name(model)  # raises where there is none
    if model.training:
        raise InvalidArgument("the model is in training: call model.eval() first")
    with computing():  # nobody else looks at it meanwhile
        known = vars(model).get(_MINE)
        if known is not None and known.is_as_it_was():
            return known  # type: ignore[no-any-return]
        unhook(model)
        executor = _looked_at(model)
        object.__setattr__(model, _MINE, executor)
        return executor


def _looked_at(model: PreTrainedModel) -> TransformersExecutor:
    """Leaves nothing on a model that is refused."""
    executor = None
    try:
        executor = TransformersExecutor(model)
        decoder = Decoder(executor.adapted.spec, _tensors(executor), executor=executor)
        require_agreement(model, decoder)
        return executor
    except BaseException as error:
        if executor is not None:
            executor.unhook()
        if isinstance(error, UnsupportedModel):
            raise UnsupportedModel(f"{type(model).__name__}{_WITHOUT}{error}") from error
        if isinstance(error, KvkeepError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModel(
            f"{type(model).__name__} failed when kvkeep looked at how it attends: {error!r}"
        ) from error


def unhook(model: PreTrainedModel) -> None:
    """Takes off a model of transformers all that kvkeep has hung on it."""
    known = vars(model).pop(_MINE, None)
    if known is not None:
        known.unhook()


def _tensors(executor: TransformersExecutor) -> dict[str, Tensor]:
    """The weights under transformers' names, and the few that kvkeep asks for under its own."""
    model = executor.model
    found = {f"transformers.{name}": each.detach() for name, each in model.state_dict().items()}
    adapted = executor.adapted
    found[NORM] = torch.zeros(0, dtype=adapted.dtype, device=adapted.device)
    for index, call in enumerate(executor.adapted.calls):
        for name in _OUTPUTS:
            output = getattr(call.module, name, None)
            if isinstance(output, nn.Linear):
                found[f"model.layers.{index}.self_attn.o_proj.weight"] = output.weight.detach()
    for index, sinks in enumerate(executor.adapted.sinks):
        found[f"model.layers.{index}.self_attn.sinks"] = sinks
    return found
