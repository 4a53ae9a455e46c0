"""Where a store is, as people write it: a folder, or a URL."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.objects.interface import ObjectStore

_REMOTE = ("s3", "s3a", "gs", "az", "abfs", "abfss", "adl", "memory")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(place: str | Path) -> bool:
    """Whether a store is given as a URL, and not as the path of a folder."""
    return isinstance(place, str) and _SCHEME.match(place) is not None


def open_object_store(place: str | Path) -> ObjectStore:
    """The store at a URL: s3://bucket/prefix, gs://..., az://..., memory://name, file:///folder; or
    in a folder. memory:// is one store per name, of this process, gone with it.

    Nothing is asked of the store yet. Raises InvalidArgument for another kind of URL, or where the
    extra `object-store` is not installed, StoreError for a folder that cannot be used.
    """
    if not isinstance(place, str) or not is_url(place):
        return FolderObjectStore(Path(place))
    scheme = urlsplit(place).scheme.lower()
    if scheme == "file":
        return FolderObjectStore(_folder(place))
    if scheme not in _REMOTE:
        raise InvalidArgument(
            "a store is a folder, or a URL of s3, gs, az, memory or file, such as "
            f"s3://bucket/prefix; found {place!r:.200}"
        )
    from kvkeep.storage.objects.remote import opened

    return opened(place)


def _folder(url: str) -> Path:
    found = urlsplit(url)
    if found.netloc not in ("", "localhost") or not found.path.startswith("/"):
        raise InvalidArgument(
            f"a file URL has three slashes, as file:///folder; found {url!r:.200}"
        )
    return Path(unquote(found.path))
