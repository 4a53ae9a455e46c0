"""Object stores: objects under keys, in a folder or in a remote store such as S3.

store = open_object_store("s3://bucket/prefix")
etag = store.put("a/b", b"...", if_absent=True)
"""

from kvkeep.storage.objects.address import is_url, open_object_store
from kvkeep.storage.objects.interface import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore", "is_url", "open_object_store"]
