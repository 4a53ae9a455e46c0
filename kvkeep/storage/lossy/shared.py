"""Bases in an object store, so that all its machines read what each of them wrote."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvkeep.errors import CorruptFile, InvalidArgument
from kvkeep.storage.lossy.basis import BASIS_SUFFIX, add_basis, load_basis, newest_basis
from kvkeep.storage.objects import ObjectStore

_KEY_PREFIX = "bases/"
_MAX_BYTES = 1 << 31  # of a file


def share_bases(store: ObjectStore, fingerprint: Mapping[str, str]) -> None:
    """Exchange bases with a store: a model's machines then write in the same one.

    All bases of the store are added to this machine. If none of them is of the model with the
    fingerprint, this machine's is added to the store. Raises StoreError.
    """
    is_stored = False
    for info in sorted(store.list_objects(_KEY_PREFIX), key=lambda info: info.st_mtime):
        content, _ = store.get(info.key, _MAX_BYTES)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "a.kvbasis"
            path.write_bytes(content)
            basis = load_basis(path)
        if info.key != f"{_KEY_PREFIX}{basis.digest}{BASIS_SUFFIX}":
            raise CorruptFile(f"{store.url}/{info.key} has the digest {basis.digest}: delete it")
        add_basis(basis)
        is_stored |= basis.fingerprint == dict(fingerprint)
    if not is_stored:
        with suppress(InvalidArgument):  # this machine has none, either
            path = add_basis(newest_basis(fingerprint))
            store.put_chunks(f"{_KEY_PREFIX}{path.name}", lambda: [path.read_bytes()])
