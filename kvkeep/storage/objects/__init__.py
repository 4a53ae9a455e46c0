"""Object stores: objects under keys, in a folder or in a remote store such as S3."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.objects.interface import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore", "is_url", "open_object_store"]

_REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "memory")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(address: str | Path) -> bool:
    """Whether an address is a URL rather than a path."""
    return isinstance(address, str) and _SCHEME.match(address) is not None


def open_object_store(address: str | Path) -> ObjectStore:
    """Open the store at a URL or in a folder. Sends no request to a remote store yet.

    address: s3://bucket/prefix, gs://..., az://..., file:///folder, a path, or memory://name, which
    lives as long as this process. Raises InvalidArgument for another URL, or if the extra
    `object-store` is not installed, StoreError for a folder that cannot be used.
    """
    if not isinstance(address, str) or not is_url(address):
        return FolderObjectStore(Path(address))
    scheme = urlsplit(address).scheme.lower()
    if scheme == "file":
        return FolderObjectStore(_file_url_path(address))
    if scheme not in _REMOTE_SCHEMES:
        raise InvalidArgument(
            "a store must be a folder, or a URL with the scheme s3, gs, az, memory or file, such "
            f"as s3://bucket/prefix; found {address!r:.200}"
        )
    try:
        from kvkeep.storage.objects.remote import open_remote_store
    except ImportError as error:
        message = f"{address} needs obstore: pip install 'kvkeep[object-store]'"
        raise InvalidArgument(message) from error
    return open_remote_store(address)


def _file_url_path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidArgument(
            f"a file URL must have three slashes, such as file:///folder; found {url!r:.200}"
        )
    return Path(unquote(parts.path))
