"""Text in files: UTF-8, of which a byte order mark is no part."""

from pathlib import Path

from kvkeep.errors import InvalidArgument

ENCODING = "utf-8-sig"  # as editors on Windows save UTF-8: it may begin with a byte order mark


def decode_text(content: bytes, source: str) -> str:
    """Decode UTF-8 without a byte order mark at its beginning.

    source: the file's name, for messages. Raises InvalidArgument if it is not UTF-8.
    """
    try:
        return content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{source} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x} "
            f"({error.reason}); expected text in UTF-8"
        ) from error


def read_text_file(path: Path) -> str:
    """All text of a file. Raises OSError, and InvalidArgument as `decode_text`."""
    return decode_text(path.read_bytes(), str(path))
