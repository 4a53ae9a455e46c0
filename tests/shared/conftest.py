"""Makes the fixtures of object stores available."""

from stores import _s3, objects, s3, s3_url, store_url

__all__ = ["_s3", "objects", "s3", "s3_url", "store_url"]
