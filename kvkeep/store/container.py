"""The file under a snapshot: a safetensors container, checked in every byte.

Any safetensors reader opens it. Beyond the format itself, kvkeep's files have tensors that begin
at multiples of 64 bytes (a kernel may take another path, and give another last bit, on memory
that is aligned otherwise), and metadata with a blake3 checksum for each tensor and one for the
header. `docs/snapshot-format.md` describes it for other readers.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.errors import CorruptFile, ForeignFile, NewerFormat, StoreError, TruncatedFile
from kvkeep.store.atomic import replacing
from kvkeep.store.raw import tensor_bytes

ALIGNMENT = 64
NO_CHECKSUM = "0" * 64  # what stands for the header's checksum while it is computed
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Container:
    """What a file holds. document: JSON values, as they were given to `write_container`."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def write_container(
    path: Path, kind: str, version: int, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> int:
    """Writes a file, or leaves the one that is there as it is. Returns its size in bytes.

    Tensors may be views with any strides; they are written piece by piece, without a copy of the
    whole. Raises StoreError where the disk or its permissions do not allow it.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    header = _Header(kind, version, document, tensors)
    try:
        with replacing(path) as file:
            file.write(bytes(header.size))
            for name, tensor in header.laid_out.items():
                digest = blake3()
                for piece in _pieces(tensor):
                    digest.update(piece)
                    file.write(piece)
                header.checksums[name] = digest.hexdigest()
            size = file.tell()
            file.seek(0)
            file.write(header.sealed())
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"{path} could not be written ({reason}); what was there before is unchanged. "
            "Free some space or choose another place"
        ) from error
    return size


class _Header:
    """The header's bytes: of one size before and after the checksums are known."""

    def __init__(
        self,
        kind: str,
        version: int,
        document: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ):
        self.kind, self.version, self.document = kind, version, document
        self.laid_out = dict(_padded(tensors))
        self.checksums = dict.fromkeys(self.laid_out, NO_CHECKSUM)
        self.size = len(self._bytes(NO_CHECKSUM))

    def sealed(self) -> bytes:
        """The final bytes, with the checksum of the header itself."""
        return self._bytes(blake3(self._bytes(NO_CHECKSUM)).hexdigest())

    def _bytes(self, checksum: str) -> bytes:
        entries: dict[str, Any] = {
            "__metadata__": {
                "kvkeep": self.kind,
                "version": str(self.version),
                "checksum": checksum,
                "checksums": json.dumps(self.checksums),
                "document": json.dumps(self.document),
            }
        }
        offset = 0
        for name, tensor in self.laid_out.items():
            end = offset + tensor.nbytes
            entries[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text


def _padded(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The format allows no holes, so what fills up to the alignment is a tensor, too."""
    for name, tensor in tensors.items():
        yield name, tensor
        if missing := -tensor.nbytes % ALIGNMENT:
            yield f"padding.{name}", torch.zeros(missing, dtype=torch.uint8)


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """A tensor's bytes in order, in dense pieces as large as its strides allow."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        if flat.numel():
            yield tensor_bytes(flat)
        return
    for part in tensor:
        yield from _pieces(part)


def read_container(path: Path, kind: str, newest: int) -> Container:
    """Opens a file and checks every byte of it. Tensors are memory-mapped, privately.

    Raises:
        ForeignFile: not a kvkeep file of this kind. NewerFormat: made by a later kvkeep.
        TruncatedFile, CorruptFile: not as it was written; the latter says where.
        StoreError: it cannot be read at all.
    """
    try:
        metadata = _checked_metadata(path, kind, newest)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CorruptFile(f"{path} is corrupt: its header does not fit its data") from error
    checksums = json.loads(metadata["checksums"])
    if checksums.keys() != tensors.keys():
        raise CorruptFile(f"{path} is corrupt: tensors are missing or added")
    for name, tensor in tensors.items():
        digest = blake3(max_threads=blake3.AUTO)
        for piece in _pieces(tensor):
            digest.update(piece)
        if digest.hexdigest() != checksums[name]:
            raise CorruptFile(
                f"{path} is corrupt: tensor {name!r} is not what was saved. The file was left as "
                "it is; restore it from a copy, or evaluate the text again"
            )
    return Container(json.loads(metadata["document"]), tensors)


def read_document(path: Path, kind: str, newest: int) -> dict[str, Any]:
    """The document alone, from a checked header; tensors are not looked at. Raises as above."""
    try:
        document = json.loads(_checked_metadata(path, kind, newest)["document"])
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error
    assert isinstance(document, dict)
    return document


def _checked_metadata(path: Path, kind: str, newest: int) -> dict[str, str]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        foreign = ForeignFile(f"{path} is not a kvkeep {kind}: its header is not one")
        if not 2 <= length <= 100_000_000:
            raise foreign
        text = file.read(length)
    if not text.startswith(b'{"__metadata__":{"kvkeep":'):
        raise foreign
    if len(text) < length:
        raise TruncatedFile(f"{path} is truncated: it ends within its header")
    found = text.find(b'"checksum":"') + len(b'"checksum":"')
    recorded = text[found : found + 64]
    blank = text[:found] + NO_CHECKSUM.encode() + text[found + 64 :]
    sound = blake3(start + blank).hexdigest().encode() == recorded
    try:
        entries = json.loads(text)
        metadata: dict[str, str] = entries.pop("__metadata__")
        version, holds = int(metadata["version"]), metadata["kvkeep"]
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is corrupt: its header cannot be read") from error
    if not sound:
        raise CorruptFile(f"{path} is corrupt: its header is not what was saved")
    if holds != kind:
        raise ForeignFile(f"{path} is a kvkeep {holds}; expected a {kind}")
    if version > newest:
        raise NewerFormat(
            f"{path} has format {version}; this kvkeep reads up to {newest}: upgrade kvkeep"
        )
    if size < 8 + length + end:
        missing = 8 + length + end - size
        raise TruncatedFile(f"{path} is truncated: {missing} of its bytes are missing")
    if size > 8 + length + end:
        raise CorruptFile(f"{path} is corrupt: {size - 8 - length - end} bytes too many")
    return metadata
