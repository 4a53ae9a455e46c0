"""A loaded model, and the sessions that it makes."""

from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.cache.layout import bits_name
from kvkeep.compiled.decoder import can_decode
from kvkeep.compression.calibration.calibration import Calibration, default_calibration
from kvkeep.errors import InvalidArgument
from kvkeep.executors import new_decoder, slowness, warn_of
from kvkeep.loaded_model import LoadedModel
from kvkeep.models.hub.source import DEFAULT_MODEL, resolve
from kvkeep.models.spec.cells import cell_layout
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_shapes, decoder_tensors, is_text
from kvkeep.models.weights.packed import (
    WEIGHTS,
    converted_file,
    load_converted,
    load_rounded,
    load_unpacked,
)
from kvkeep.models.weights.packing import Matrix, PackedMatrix
from kvkeep.models.weights.tensors import check_tensors, check_tied, read_shapes, read_tensors
from kvkeep.policies import Policy, PolicySettings, longest, make_policy
from kvkeep.runtime.cpu import fit_threads
from kvkeep.runtime.memory import trim
from kvkeep.session.session import WHOLE_PROMPT, Session
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import DtypeName, KvBits, PolicyName, WeightsName

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model(LoadedModel):
    """A loaded model that makes sessions; any number of them share it."""

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of this model on this machine; None if there is none.

        `kvkeep pull --calibrate` and `kvkeep calibrate TEXT` make one. Each access reads its file.
        Raises StoreError or a subclass if the file is damaged.
        """
        return default_calibration(self)

    def restore(
        self,
        snapshot: Snapshot,
        store: PrefixCache | None = None,
        calibration: Calibration | None = None,
    ) -> Session:
        """Return a session that continues exactly where the snapshot was taken.

        calibration: the one that the session was created with, if any.

        Raises FingerprintMismatch, naming what differs, for a snapshot of another model,
        InvalidSnapshot for one that no session of this model can have been in, and InvalidArgument
        if its calibration is missing.
        """
        validation.instance("snapshot", snapshot, Snapshot)
        return Session.restored(self, snapshot, store, calibration)

    def session(
        self,
        max_kv_size: int | None = None,
        keep: int | None = None,
        policy: PolicyName | Policy = "sliding",
        prefill_step: int = 512,
        store: PrefixCache | None = None,
        *,
        bits: Bits | None = None,
        kv_bits: KvBits | None = None,
        far_bits: KvBits | None = None,
        calibration: Calibration | None = None,
        **settings: Unpack[PolicySettings],
    ) -> Session:
        """Return a new, empty session.

        Args:
            policy: what happens when the budget is reached: `Sliding(512)`, `Shift`, `Archive`,
                `SelfExtend` or `Full` with their settings, or the name of one of these, with its
                settings as arguments here.
            max_kv_size: the budget: the most cells (tokens of context) it holds. None for the
                trained length, or for the reach of self-extend.
            keep: how many of the first tokens are never evicted, 4 by default; -1 for the whole
                first prompt. For "sliding", "shift" and "archive".
            settings: `discard` of "shift": how many of the oldest cells are evicted at once (half
                by default). `group` and `window` of "self_extend": positions per group, and newest
                tokens that are not grouped. `window`, `method` and `ratio` of "archive": how many
                of the newest tokens are kept exactly (eleven sixteenths of the budget by default),
                and how older ones are compressed.
            prefill_step: the most prompt tokens evaluated at once. It changes speed and memory, and
                logits by rounding only, unless cells are quantised: tokens of a step see each
                other's cells unquantised, and those of earlier steps quantised. With `far_bits`
                this matters only below `keep`.
            store: the prefix cache for first prompts.
            bits: the number of bits in which cells are stored, `Bits(kv="8")`; or use the next two.
            kv_bits: 8, 4 or "8/4" (keys and values) for all cells.
            far_bits: the same for cells outside the window: kept, pinned, compressed and grouped.
            calibration: the model's statistics for "archive"; see `load_calibration`.

        Raises InvalidArgument for a number out of range, an unknown policy, and a setting that the
        policy does not have.
        """
        keep_all = validation.optional_integer("keep", keep, WHOLE_PROMPT) == WHOLE_PROMPT
        if isinstance(policy, Policy):
            if names := _names_given(max_kv_size=max_kv_size, keep=keep, **settings):
                raise InvalidArgument(
                    f"{', '.join(names)} cannot be given beside {policy}, which says it already"
                )
            chosen = policy
        else:
            named: dict[str, Any] = {**settings, "keep": 0 if keep_all else keep}
            if max_kv_size is None:
                max_kv_size = longest(policy, self.spec.max_positions, **named)
            chosen = make_policy(policy, max_kv_size, **named)
        chosen = self._fit_policy(chosen)
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(self)
            chosen = chosen.calibrated(calibration.statistics, calibration.digest)
        chosen.require_statistics()
        if bits is not None and _names_given(kv_bits=kv_bits, far_bits=far_bits):
            raise InvalidArgument("give bits, or kv_bits or far_bits")
        bits = bits or Bits(bits_name(kv_bits), bits_name(far_bits))
        session = Session(self, chosen, prefill_step, store, bits)
        if keep_all:
            session.keep = WHOLE_PROMPT
        return session

    def _fit_policy(self, policy: Policy) -> Policy:
        """Return the policy for this model; raise InvalidArgument if it attends too far back."""
        try:
            return policy.for_model(self.spec.max_positions)
        except InvalidArgument as error:
            if self.spec.rope.kind != "longrope":
                raise
            raise InvalidArgument(
                f"{error}. The model's RoPE is longrope: further than that it rotates by another "
                "table, which keys that are written once cannot take. Give no max_kv_size or a "
                'smaller one: such a session goes on for ever, and policy "self_extend" looks '
                "further"
            ) from error


def _names_given(**settings: object) -> list[str]:
    return [name for name, value in settings.items() if value is not None]


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    dtype: DtypeName = "bfloat16",
    device: str = "cpu",
    weights: WeightsName | None = None,
    progress: bool = False,
) -> Model:
    """Load a model that kvkeep computes; arguments and errors as for `kvkeep.load_model`."""
    model, dtype = str(validation.path("model", model)), validation.one_of("dtype", dtype, DTYPES)
    fit_threads()
    target, progress = on_device(device), validation.flag("progress", progress)
    folder = resolve(model, progress)
    spec = read_spec(folder)
    if weights is not None:
        weights = validation.one_of("weights", weights, WEIGHTS)
    text = TextCodec.open(folder)
    converted, packed = converted_file(folder), dict[str, Matrix]()
    if converted is None:
        tensors = _read_tensors(folder, spec, DTYPES[dtype], target, progress)
    else:
        stored = load_converted(converted, spec)
        tensors, packed = _split_packed(stored, DTYPES[dtype], target)
    kernels = can_decode(spec, cell_layout(spec, tensors))
    if converted is not None and (weights or not kernels):
        unpacked = load_unpacked(converted, spec, stored, DTYPES[dtype], progress)
        tensors, packed = {name: tensor.to(target) for name, tensor in unpacked.items()}, {}
    if weights in ("int8", "int4"):
        if not kernels:
            raise InvalidArgument(
                f'weights="{weights}" is read by compiled kernels, and there are none for this '
                'model, dtype, device and processor: use weights="bf16"'
            )
        packed = load_rounded(folder, spec, weights, tensors, progress)
    loaded = Model(model, folder, new_decoder(spec, tensors, packed), text)
    warn_of(slowness(loaded.path))
    trim()  # reading a tokenizer leaves as much free memory as it takes
    return loaded


def _read_tensors(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: bool
) -> dict[str, Tensor]:
    """Read and check the tensors of a folder in Hugging Face layout."""
    check_tensors(spec, decoder_shapes(spec, read_shapes(folder)), folder)
    read = read_tensors(folder, dtype, device, progress, partial(is_text, spec))
    tensors = decoder_tensors(spec, read)
    check_tied(spec, tensors, folder)
    return tensors


def _split_packed(
    stored: dict[str, Matrix], dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Matrix]]:
    """Split a converted model into tensors of the dtype, and matrices in other forms."""
    packed = {
        name: matrix
        for name, matrix in stored.items()
        if isinstance(matrix, PackedMatrix) or (matrix.dim() == 2 and matrix.dtype != dtype)
    }
    tensors = {
        name: matrix.to(device=device, dtype=dtype)
        for name, matrix in stored.items()
        if isinstance(matrix, Tensor) and name not in packed
    }
    return tensors, packed


def on_device(name: str) -> torch.device:
    """Return a torch device by name. Raises InvalidArgument if it cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float32, device=device).cpu()  # "meta" can be created, not read
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        raise InvalidArgument(
            f"device {name!r} cannot be used: torch {torch.__version__} has {_devices()} here"
        ) from error
    return device


def _devices() -> str:
    """The usable devices, for messages."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return ", ".join([*names, "mps"] if torch.backends.mps.is_available() else names)
