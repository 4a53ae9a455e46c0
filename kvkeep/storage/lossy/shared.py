"""Bases in an object store, so that all its machines read what each of them wrote."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.lossy.basis import (
    BASIS_SUFFIX,
    CellBasis,
    add_basis,
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
    fingerprint, this machine's is added to the store. Damaged ones are skipped with a warning.
    Raises StoreError.
    """
    is_stored = False
    for info in sorted(store.list_objects(_KEY_PREFIX), key=lambda info: info.st_mtime):
        basis = _read(store, info.key)
        if basis is not None:
            add_basis(basis)
            is_stored |= basis.fingerprint == dict(fingerprint)
    if not is_stored:
        with suppress(InvalidArgument):  # this machine has none, either
            path = add_basis(newest_basis(fingerprint))
            store.put_chunks(f"{_KEY_PREFIX}{path.name}", lambda: [path.read_bytes()])


def _read(store: ObjectStore, key: str) -> CellBasis | None:
    """Return the basis of an object; None if it is damaged."""
    content, _ = store.get(key, _MAX_BYTES)
    with TemporaryDirectory() as folder:
        path = Path(folder) / key.removeprefix(_KEY_PREFIX)
        path.write_bytes(content)
        try:
            basis = load_basis(path)
        except StoreError as error:
            _log.warning("%s/%s is not a usable basis: %s", store.url, key, error)
            return None
    if key != f"{_KEY_PREFIX}{basis.digest}{BASIS_SUFFIX}":
        _log.warning("%s/%s has the digest %s: delete it", store.url, key, basis.digest)
        return None
    return basis
