"""Bases in an object store, so that all its machines read what each of them wrote."""

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep.errors import InvalidArgument, NoObject, StoreError
from kvkeep.storage.lossy.basis import (
    BASIS_SUFFIX,
    CellBasis,
    add_basis,
    find_basis,
    load_basis,
    newest_basis,
)
from kvkeep.storage.objects import ObjectStore

_log = logging.getLogger("kvkeep.storage")
_KEY_PREFIX = "bases/"
_MAX_BYTES = 1 << 31  # of a file


def share_bases(store: ObjectStore, fingerprint: Mapping[str, str]) -> None:
    """Exchange bases with a store: a model's machines then write in the same one.

    All bases of the store are added to this machine. If none of them is of the model with the
    fingerprint, this machine's is added to the store. Damaged ones are skipped with a warning, and
    those that are here intact are not read from the store. Raises StoreError.
    """
    is_stored = False
    for info in sorted(store.list_objects(_KEY_PREFIX), key=lambda info: info.st_mtime):
        name = info.key.removeprefix(_KEY_PREFIX)
        if "/" in name or not name.endswith(BASIS_SUFFIX):
            continue  # written by other software
        basis = _read(store, name.removesuffix(BASIS_SUFFIX))
        if basis is not None:
            add_basis(basis)
            is_stored |= basis.fingerprint == dict(fingerprint)
    if not is_stored:
        with suppress(InvalidArgument):  # this machine has none, either
            path = add_basis(newest_basis(fingerprint))
            store.put_chunks(f"{_KEY_PREFIX}{path.name}", lambda: [path.read_bytes()])


def fetch_bases(store: ObjectStore, digests: Collection[str]) -> None:
    """Add bases to this machine that it lacks and a store has, older than its own ones.

    Cells are written in the newest basis, and reading changes nothing of that. Raises StoreError.
    """
    for digest in digests:
        with suppress(NoObject):
            if (basis := _read(store, digest)) is not None:
                add_basis(basis, is_newest=False)


def _read(store: ObjectStore, digest: str) -> CellBasis | None:
    """Return a basis, from the store unless it is here; None if it is damaged."""
    with suppress(StoreError):
        return find_basis(digest)
    key = f"{_KEY_PREFIX}{digest}{BASIS_SUFFIX}"
    content, _ = store.get(key, _MAX_BYTES)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{digest}{BASIS_SUFFIX}"
        path.write_bytes(content)
        try:
            basis = load_basis(path)
        except StoreError as error:
            _log.warning("%s/%s is not a usable basis: %s", store.url, key, error)
            return None
    if digest != basis.digest:
        _log.warning("%s/%s has the digest %s: delete it", store.url, key, basis.digest)
        return None
    return basis
