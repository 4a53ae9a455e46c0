"""Text files: UTF-8, with or without a byte order mark."""

from pathlib import Path

from kvkeep.errors import InvalidArgument

ENCODING = "utf-8-sig"  # removes the byte order mark that editors on Windows write


def decode_text(content: bytes, source: str) -> str:
    """Decode UTF-8. source: for messages. Raises InvalidArgument if it is not UTF-8."""
    try:
        return content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x} "
            f"({error.reason}); expected text in UTF-8"
        ) from error


def read_text_file(path: Path) -> str:
    """Read UTF-8. Raises OSError, and InvalidArgument as `decode_text`."""
    return decode_text(path.read_bytes(), str(path))
