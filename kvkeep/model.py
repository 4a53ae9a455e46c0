"""A loaded model, and the sessions that it makes."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvkeep import arguments
from kvkeep.calibration import Calibration
from kvkeep.capture import revive
from kvkeep.compiled.decoder import can_decode
from kvkeep.context import WHOLE_PROMPT
from kvkeep.errors import InvalidArgument
from kvkeep.executors import new_decoder
from kvkeep.models.config import read_spec
from kvkeep.models.llama import Decoder, cell_layout
from kvkeep.models.packed import WEIGHTS, Weights, find_packed, stored
from kvkeep.models.packing import PackedMatrix
from kvkeep.models.source import DEFAULT_MODEL, resolve
from kvkeep.models.spec import ModelSpec
from kvkeep.models.text import TextCodec
from kvkeep.models.weights import check_tensors, read_shapes, read_tensors
from kvkeep.policies import Archive, Policy, checked_bits, longest, make_policy
from kvkeep.session import Session
from kvkeep.store.fingerprint import Fingerprint, fingerprint
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.snapshot import Snapshot

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model:
    """Weights and text of one model; any number of sessions share it.

    name: as it was asked for. folder: where its files are.
    """

    def __init__(self, name: str, folder: Path, decoder: Decoder, text: TextCodec):
        self.name = name
        self.folder = folder
        self.decoder = decoder
        self.text = text

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def weights(self) -> Weights:
        """What a decode step reads: "int4" where layers are packed in 4 bits, and so on."""
        bits = {matrix.bits for matrix in self.decoder.packed.values()}
        return "int4" if 4 in bits else "int8" if bits else "bf16"

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What snapshots of this model's sessions are recognised by. Reads all weights, once."""
        return fingerprint(
            self.spec,
            self.decoder.tensors,
            self.text.tokenizer.to_str(),
            self.decoder.new_cache().layout,
        )

    def restore(
        self,
        snapshot: Snapshot,
        store: PrefixStore | None = None,
        calibration: Calibration | None = None,
    ) -> Session:
        """A session that goes on exactly where the snapshot was taken.

        calibration: the one that the session was begun with, if it was.

        Raises FingerprintMismatch, naming what differs, for a snapshot of another model, and
        InvalidArgument where it needs a calibration that is not given.
        """
        arguments.instance("snapshot", snapshot, Snapshot)
        session = revive(self, snapshot, store)
        policy = session._memory.policy
        needed = policy.calibrated_by if isinstance(policy, Archive) else ""
        found = calibration.digest if calibration else ""
        if needed and found != needed:
            raise InvalidArgument(
                f"the snapshot's session compresses by the calibration {needed[:12]}; found "
                f"{found[:12] or 'none'}: give the one that it was begun with"
            )
        if needed:
            self._calibrate(policy, calibration)
        return session

    def session(
        self,
        max_kv_size: int | None = None,
        keep: int = 4,
        policy: str = "sliding",
        prefill_step: int = 512,
        store: PrefixStore | None = None,
        discard: int | None = None,
        group: int | None = None,
        window: int | None = None,
        method: str | None = None,
        ratio: float | None = None,
        calibration: Calibration | None = None,
        kv_bits: str | None = None,
        far_bits: str | None = None,
    ) -> Session:
        """A new, empty session.

        Args:
            max_kv_size: the most cells (tokens of context) it holds; None for the trained length,
                or for as far as self-extend reaches.
            keep: how many of the first tokens stay for ever; -1 for the whole first prompt.
            policy: what happens when the budget is reached: "sliding", "shift", "archive",
                "self_extend" or "full".
            prefill_step: tokens evaluated at once; changes speed and memory, not results.
            store: where the first prompt's evaluated beginning is looked up and kept.
            discard: of "shift", how many of the oldest cells go at once; half by default.
            group, window: of "self_extend", positions per group and the exact neighbourhood;
                the window of "archive" too, eleven sixteenths of the budget by default.
            method, ratio: of "archive", how what leaves the window is compressed, and how much.
            calibration: of "archive", what is known of the model; see `load_calibration`.
            kv_bits: "8", "4" or "8/4" (keys and values) to keep cells quantised.
            far_bits: the same, but not of the window: of the kept, pinned and compressed cells,
                and of those that self-extend has grouped.

        Raises InvalidArgument for a number out of range or an unknown policy.
        """
        keep = arguments.whole("keep", keep, WHOLE_PROMPT)
        group = arguments.optional_whole("group", group)
        window = arguments.optional_whole("window", window)
        most = longest(policy, self.spec.max_positions, group=group, window=window)
        budget = most if max_kv_size is None else arguments.whole("max_kv_size", max_kv_size)
        if not 1 <= budget <= most:
            raise InvalidArgument(
                f"max_kv_size must be 1 to {most}, what policy {policy!r} can do with a model "
                f"trained for {self.spec.max_positions} positions; found {budget}"
            )
        whole = keep == WHOLE_PROMPT
        chosen = make_policy(
            policy,
            budget,
            keep=0 if whole else keep,
            discard=arguments.optional_whole("discard", discard),
            group=group,
            window=window,
            method=method,
            ratio=None if ratio is None else arguments.number("ratio", ratio),
            span=min(2 * budget, self.spec.max_positions) if policy == Archive.name else None,
        )
        self._calibrate(chosen, calibration)
        bits = checked_bits(policy, kv_bits, far_bits)
        session = Session(self, chosen, prefill_step, store, bits)
        if whole:
            session.keep = WHOLE_PROMPT
        return session

    def _calibrate(self, policy: Policy, calibration: Calibration | None) -> None:
        """Hands a policy what is known of the model. Raises InvalidArgument for one without use."""
        if calibration is None:
            return
        arguments.instance("calibration", calibration, Calibration)
        calibration.require(self)
        if not isinstance(policy, Archive):
            raise InvalidArgument(f'policy "{policy.name}" has no use for a calibration')
        policy.calibrate(calibration.statistics, calibration.digest)


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    weights: str | None = None,
    progress: bool = False,
) -> Model:
    """Loads a model, pulling or converting it first where that was not done before.

    Args:
        model: a known name, a GGUF file, a local Hugging Face folder, or a hub id.
        dtype: "bfloat16" or "float32", of weights and cells.
        device: any torch device.
        weights: what a decode step reads for each token: "bf16", "int8" or "int4". None for the
            best quality that the model's file has: what a GGUF packs in 4 or 8 bits is read as it
            is. Other weights are rounded. Prompts are multiplied in `dtype` in any case.
        progress: progress bars on standard error.

    Raises:
        ModelNotFound, BadModelFile, UnsupportedModel: see their messages.
        InvalidArgument: an unknown dtype, a device that is not there, packed weights where there
            are no compiled kernels for them.
    """
    model, dtype = str(arguments.path("model", model)), arguments.one_of("dtype", dtype, DTYPES)
    where, progress = _device(device), arguments.flag("progress", progress)
    folder = resolve(model, progress)
    spec = read_spec(folder)
    check_tensors(spec, read_shapes(folder), folder)
    text = TextCodec.open(folder)
    tensors = read_tensors(folder, DTYPES[dtype], where, progress)
    packed = _packed(folder, spec, weights, tensors, progress)
    return Model(model, folder, new_decoder(spec, tensors, packed), text)


def _packed(
    folder: Path,
    spec: ModelSpec,
    weights: str | None,
    tensors: Mapping[str, Tensor],
    progress: bool,
) -> Mapping[str, PackedMatrix]:
    chosen = stored(folder) if weights is None else arguments.one_of("weights", weights, WEIGHTS)
    if chosen == "bf16":
        return {}
    if not can_decode(spec, cell_layout(spec, tensors)):
        if weights is None:
            return {}
        raise InvalidArgument(
            f'weights="{weights}" is read by compiled kernels, and there are none for this model, '
            'dtype, device and processor: use weights="bf16"'
        )
    return find_packed(folder, spec, "int4" if chosen == "int4" else "int8", tensors, progress)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"device {name!r} cannot be used: {reason}") from error
    return device
