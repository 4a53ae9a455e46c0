"""Packing of small integers, component by component, into a compressed frame.

Most components of a cell are within one or a few steps of 0, and zstd's Huffman codes take at least
one bit per byte. So as many numbers of a component share a byte as its largest number allows. A
frame contains a byte per component, its width, and then all components of each width in turn.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int16]

MAX_MAGNITUDE = 32767
_ZSTD_LEVEL = 1
# Widths: all 0 (no bytes); -1 to 1, five to a byte; -7 to 7, two to a byte; one byte; two bytes.
_MAGNITUDES = np.array([0, 1, 7, 127])  # the largest of each width but the last
_TERNARY, _QUATERNARY, _BYTE, _TWO_BYTES = 1, 2, 3, 4
_PER_BYTE = {_TERNARY: 5, _QUATERNARY: 2}
_BASE, _OFFSET = {_TERNARY: 3, _QUATERNARY: 16}, {_TERNARY: 1, _QUATERNARY: 8}


def pack(integers: Integers) -> bytes:
    """Return a zstd frame of `[components, n]` integers."""
    magnitudes = np.maximum(integers.max(1, initial=0), -integers.min(1, initial=0))
    widths = np.searchsorted(_MAGNITUDES, magnitudes).astype(np.uint8)
    parts: list[npt.NDArray[np.generic]] = [widths]
    for width in (_TERNARY, _QUATERNARY):
        parts.append(_join(integers[widths == width], width))
    parts.append(integers[widths == _BYTE].astype(np.int8))
    wide = integers[widths == _TWO_BYTES]
    parts += [(wide & 255).astype(np.uint8), (wide >> 8).astype(np.int8)]
    content = b"".join(part.tobytes() for part in parts)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(content)


def unpack(frame: bytes, components: int, count: int) -> Integers:
    """Undo `pack`. Raises ValueError if the frame is not of `[components, count]` integers."""
    most_bytes = components * (1 + 2 * count)
    size = _content_size(frame)
    if not components <= size <= most_bytes:
        raise ValueError(f"{size} bytes cannot be {components} components of {count} cells")
    try:
        content = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed cells cannot be read: {error}") from error
    data = np.frombuffer(content, np.uint8)
    widths, at = data[:components], components
    if widths.max(initial=0) > _TWO_BYTES:
        raise ValueError(f"unknown width of a component: {widths.max()}")
    integers = np.zeros((components, count), np.int16)
    groups = [np.flatnonzero(widths == width) for width in range(_TWO_BYTES + 1)]
    sizes = [len(group) * _row_bytes(width, count) for width, group in enumerate(groups)]
    if at + sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes of cells; expected {at + sum(sizes)}")
    for width in (_TERNARY, _QUATERNARY, _BYTE, _TWO_BYTES):
        part, at = data[at : at + sizes[width]], at + sizes[width]
        integers[groups[width]] = _numbers(part, width, len(groups[width]), count)
    return integers


def _content_size(frame: bytes) -> int:
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed cells cannot be read: {error}") from error


def _row_bytes(width: int, count: int) -> int:
    """Return the bytes of `count` numbers of a component."""
    if width in _PER_BYTE:
        return -(-count // _PER_BYTE[width])
    return {0: 0, _BYTE: count, _TWO_BYTES: 2 * count}[width]


def _numbers(part: Bytes, width: int, components: int, count: int) -> npt.NDArray[np.generic]:
    """Return `[components, count]` numbers from the bytes of one width."""
    if width == _BYTE:
        return part.view(np.int8).reshape(components, count)
    if width == _TWO_BYTES:
        low, high = part.reshape(2, components, count)
        return low | (high.view(np.int8).astype(np.int16) << 8)
    if len(part) and part.max() >= _BASE[width] ** _PER_BYTE[width]:
        raise ValueError("a byte of ternary numbers is above 242")
    per_byte = _PER_BYTE[width]
    rows: npt.NDArray[np.int8] = np.take(_TABLES[width], part, 0)
    return rows.reshape(components, -(-count // per_byte) * per_byte)[:, :count]


def _join(rows: Integers, width: int) -> Bytes:
    """Join numbers of each row to bytes: the first is the lowest digit."""
    per_byte, base, offset = _PER_BYTE[width], _BASE[width], _OFFSET[width]
    columns = -(-rows.shape[1] // per_byte) * per_byte
    digits = np.full((len(rows), columns), offset, np.uint8)
    digits[:, : rows.shape[1]] = rows.astype(np.uint8)
    digits[:, : rows.shape[1]] += np.uint8(offset)  # modulo 256
    if width == _QUATERNARY:
        pairs = digits.view("<u2")  # much faster than digits at a distance of two
        in_one_byte: Bytes = (pairs | pairs >> 4).astype(np.uint8)
        return in_one_byte
    joined = digits[:, per_byte - 1 :: per_byte].copy()
    for digit in reversed(range(per_byte - 1)):
        joined *= np.uint8(base)
        joined += digits[:, digit::per_byte]
    return joined


def _table(width: int) -> npt.NDArray[np.int8]:
    """Return the numbers of each byte, `[256, per_byte]`."""
    per_byte, base, offset = _PER_BYTE[width], _BASE[width], _OFFSET[width]
    powers: Sequence[int] = [base**digit for digit in range(per_byte)]
    digits = np.arange(256)[:, None] // np.array(powers) % base
    numbers: npt.NDArray[np.int8] = (digits - offset).astype(np.int8)
    return numbers


_TABLES = {width: _table(width) for width in _PER_BYTE}
