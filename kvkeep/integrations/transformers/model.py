"""A transformers model as a kvkeep model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, finalize

import torch
import transformers
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from kvkeep import validation
from kvkeep.errors import (
    BadModelFile,
    InvalidArgument,
    KvkeepError,
    ModelError,
    UnsupportedModel,
)
from kvkeep.executors import ComputePath
from kvkeep.integrations.transformers.executor import TransformersExecutor, require_agreement
from kvkeep.integrations.transformers.forward_hooks import hook_forward
from kvkeep.integrations.transformers.interface import body_name
from kvkeep.model import DTYPES, Model, resolve_device
from kvkeep.models.hub.source import resolve
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.primitives import FINAL_NORM
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.packed import converted_file
from kvkeep.runtime.cpu import limit_torch_threads
from kvkeep.runtime.worker import compute_lock
from kvkeep.storage.snapshots.fingerprint import Fingerprint, compute_fingerprint, weights_digest
from kvkeep.types import DtypeName

_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")  # names in different architectures
# For each tokenizer: its settings, and kvkeep's codec.
_CODECS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, TextCodec]] = WeakKeyDictionary()
_EXECUTOR_ATTRIBUTE = "_kvkeep_executor"  # of a transformers model
# Config keys that do not change the contents of cells.
_NOT_FINGERPRINTED = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"),
)


class TransformersModel(Model):
    """A kvkeep model whose layers transformers computes; see `from_transformers`.

    executor: runs the transformers model, and is attached to it. tokenizer: of transformers.
    """

    tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, name: str, executor: TransformersExecutor, text: TextCodec):
        self.executor = executor
        decoder = Decoder(executor.facts.spec, _weights_by_name(executor), executor=executor)
        super().__init__(name, text.folder, decoder, text)

    def __repr__(self) -> str:
        layout, model = self.decoder.new_cache().layout, self.executor.model
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        return (
            f"<{type(self).__name__} {self.name}: {self.spec.architecture} by transformers, "
            f"{self.spec.layers} layers with cells, {millions:,.1f} million weights in "
            f"{str(layout.dtype).removeprefix('torch.')} on {layout.device}>"
        )

    @cached_property
    def path(self) -> ComputePath:
        """The executor of the layers, and the reason why no compiled kernel runs."""
        return ComputePath(
            "transformers", {"the compiled kernels": "run only with kvkeep's own models"}
        )

    @cached_property
    def _generation_config(self) -> tuple[Mapping[str, Any], object]:
        model = self.executor.model
        values = model.generation_config.to_diff_dict() if model.can_generate() else {}
        return values, "the model's generation_config"

    @property
    def arithmetic(self) -> dict[str, str]:
        """Versions and settings that a result's bits depend on, those of transformers included."""
        return super().arithmetic | {"transformers": transformers.__version__}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The identity of the model in saved files, with transformers' complete config in it."""
        config = self.executor.configs[0].to_dict()
        config = {name: value for name, value in config.items() if name not in _NOT_FINGERPRINTED}
        config_json = json.dumps(config, sort_keys=True, default=str)
        layout = self.decoder.new_cache().layout
        return replace(
            compute_fingerprint(self.spec, {}, self.text.tokenizer, layout),
            weights=weights_digest(self.decoder.tensors),
            config=blake3(config_json.encode()).hexdigest(),
        )


class _NoCodec(TextCodec):
    """The codec of a model without a tokenizer, which raises InvalidArgument for any text."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidArgument(
            "there is no tokenizer to convert between text and tokens: use token ids, or pass "
            "tokenizer=... when you load the model"
        )

    encode = encode_sealed = decode = _refuse


def from_transformers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    name: str | None = None,
) -> TransformersModel:
    """Turn a transformers model into a kvkeep model, with sessions, policies and stores.

    Args:
        model: any model that generates text (`AutoModelForCausalLM`), on any device and in any
            dtype. It computes as without kvkeep, except for its attention. Forwards of one token
            probe first how its layers attend. It stays usable by itself.
        tokenizer: the model's, or the folder where it is saved; None for sessions that take and
            return token ids only.
        name: the model's name in its snapshots; by default the one that it was loaded by.

    Raises:
        UnsupportedModel: naming why, for a model whose cells kvkeep does not support.
        InvalidArgument: for anything but a transformers model in evaluation mode.
        ImportError: on import, for a version of transformers that kvkeep is not tested with.
    """
    executor = executor_of(model)
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    if tokenizer is None:
        return TransformersModel(name, executor, _NoCodec(Path(), Tokenizer(BPE())))
    if isinstance(tokenizer, str | Path):
        return TransformersModel(name, executor, TextCodec.open(Path(tokenizer)))
    kvkeep_model = TransformersModel(name, executor, _codec_of(tokenizer))
    kvkeep_model.tokenizer = tokenizer
    return kvkeep_model


def _codec_of(tokenizer: PreTrainedTokenizerBase) -> TextCodec:
    """Return kvkeep's codec for a tokenizer, a new one if its settings changed."""
    settings = _settings_of(tokenizer)
    known_settings, codec = _CODECS.get(tokenizer, (None, None))
    if codec is None or known_settings != settings:
        folder = TemporaryDirectory(prefix="kvkeep-tokenizer-")
        tokenizer.save_pretrained(folder.name)
        codec = TextCodec.open(Path(folder.name))
        finalize(codec, folder.cleanup)  # a codec reads its files later, too
        _CODECS[tokenizer] = settings, codec
    return codec


def _settings_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what users change in a loaded tokenizer, as text."""
    # Of an empty text, the ids are those that are added to every text, such as BOS.
    added_ids, added_tokens = tokenizer.encode(""), tokenizer.added_tokens_decoder
    parts = (len(tokenizer), added_tokens, tokenizer.special_tokens_map, added_ids)
    return repr((*parts, tokenizer.chat_template))


def load_pretrained(
    name: str, model: str, dtype: DtypeName, device: str, progress: bool
) -> TransformersModel:
    """Load a model by transformers. name: in snapshots. model: a name or path, as in `resolve`.

    Raises ModelNotFound, BadModelFile, UnsupportedModel, InvalidArgument, and ModelError if
    transformers needs another package to read it.
    """
    dtype = validation.one_of("dtype", dtype, DTYPES)
    target_device = resolve_device(device)
    limit_torch_threads()
    folder = resolve(model, progress, any_architecture=True)
    if converted_file(folder) is not None:
        raise UnsupportedModel(
            f"{model} has packed weights, which transformers cannot read: unpack it with `kvkeep "
            f"models export {model} FOLDER`, then pass transformers:FOLDER"
        )
    bars_were_shown = hf_logging.is_progress_bar_enabled()
    _show_progress_bars(progress)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
        )
    except ImportError as error:
        raise ModelError(
            f"transformers cannot load {folder} with the packages that are installed: {error}"
        ) from error
    except Exception as error:  # of many types, from the checks of each config, and of safetensors
        raise BadModelFile(
            f"transformers cannot load {folder} ({type(error).__name__}: {error}); check its "
            "config.json, or fetch the model again"
        ) from error
    finally:
        _show_progress_bars(bars_were_shown)
    transformers_model, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):  # transformers leaves them random
        raise BadModelFile(
            f"{folder} lacks {len(missing)} tensors of a {type(transformers_model).__name__}, "
            f"among them {', '.join(missing[:3])}; fetch the model again"
        )
    transformers_model.to(target_device).eval()
    return from_transformers(transformers_model, folder, name)


def _show_progress_bars(should_show: bool) -> None:
    switch = hf_logging.enable_progress_bar if should_show else hf_logging.disable_progress_bar
    switch()  # type: ignore[no-untyped-call]


def executor_of(model: PreTrainedModel) -> TransformersExecutor:
    """Return a model's executor; probe the model first if its dtype, device or modules changed."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgument(f"model must be a transformers model; found {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder model; kvkeep supports decoder-only "
            "models"
        )
    body_name(model)  # raises for a model without a head over a body
    if model.training:
        raise InvalidArgument("the model is in training mode: call model.eval() first")
    with compute_lock():  # one thread at a time probes the model
        executor = vars(model).get(_EXECUTOR_ATTRIBUTE)
        if executor is None or not executor.is_current():
            unhook(model)
            executor = _new_executor(model)
            object.__setattr__(model, _EXECUTOR_ATTRIBUTE, executor)
        return executor


def _new_executor(model: PreTrainedModel) -> TransformersExecutor:
    """Probe and check a model. Leaves no hooks on an unsupported model."""
    executor = None
    try:
        executor = TransformersExecutor(model)
        decoder = Decoder(executor.facts.spec, _weights_by_name(executor), executor=executor)
        require_agreement(model, decoder)
        executor.hook_handles += hook_forward(executor.body)
        return executor
    except BaseException as error:
        if executor is not None:
            executor.unhook()
        name = type(model).__name__
        if isinstance(error, UnsupportedModel):
            message = f"{name} is not supported by kvkeep: {error}"
            raise UnsupportedModel(message) from error
        if isinstance(error, KvkeepError) or not isinstance(error, Exception):
            raise
        raise UnsupportedModel(
            f"{name} failed while kvkeep probed its attention: {error!r}"
        ) from error


def unhook(model: PreTrainedModel) -> None:
    """Remove everything that kvkeep has attached to a transformers model."""
    executor = vars(model).pop(_EXECUTOR_ATTRIBUTE, None)
    if executor is not None:
        executor.unhook()


def _weights_by_name(executor: TransformersExecutor) -> dict[str, Tensor]:
    """Return all weights by transformers' names, and a few by the names that kvkeep reads."""
    facts = executor.facts
    tensors = {
        f"transformers.{name}": weight.detach()
        for name, weight in executor.model.state_dict().items()
    }
    tensors[FINAL_NORM] = torch.zeros(0, dtype=facts.dtype, device=facts.device)
    for index, call in enumerate(facts.calls):
        for name in _OUTPUT_PROJECTIONS:
            linear = getattr(call.module, name, None)
            if isinstance(linear, nn.Linear):
                tensors[f"model.layers.{index}.self_attn.o_proj.weight"] = linear.weight.detach()
    for index, sinks in enumerate(facts.sinks):
        tensors[f"model.layers.{index}.self_attn.sinks"] = sinks
    return tensors
