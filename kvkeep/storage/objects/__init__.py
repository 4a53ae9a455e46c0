"""Objects under keys, in a folder or in an object store: what must outlive a machine.

store = open_objects("s3://bucket/prefix")
tag = store.put("a/b", b"...", if_absent=True)
"""

from kvkeep.storage.objects.address import is_url, open_objects
from kvkeep.storage.objects.interface import Objects, Stored

__all__ = ["Objects", "Stored", "is_url", "open_objects"]
