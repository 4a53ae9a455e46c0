"""HTTP connections to a server: its address, the API key, and whether proxies are used."""

import ipaddress
import re
import ssl
from typing import Any

import httpx

from kvkeep.errors import InvalidArgument

_TIMEOUT = httpx.Timeout(10.0, read=None)  # prefill of a long prompt has no time limit
_KEY = re.compile("[!-~]+")  # what a header can hold


def http_options(url: str, api_key: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an httpx client for a server. options: others, which take precedence.

    A server on this machine is reached without the proxies of the environment. Raises
    InvalidArgument for an address or a key that cannot be one.
    """
    address, headers = _address(url), httpx.Headers()
    if api_key is not None:
        if not _KEY.fullmatch(api_key):
            raise InvalidArgument(
                "an API key has ASCII characters only, and no spaces: check --api-key and "
                "$KVKEEP_API_KEY"
            )
        headers["Authorization"] = f"Bearer {api_key}"
    headers.update(options.get("headers"))
    is_loopback = _is_loopback(address.host)
    defaults: dict[str, Any] = {"timeout": _TIMEOUT, "trust_env": not is_loopback}
    if is_loopback and address.scheme == "http":
        # httpx loads all certificates of the system (30 ms) otherwise. This context has none, so
        # that a redirect to another address by TLS fails.
        defaults["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return {"base_url": address, **defaults, **options, "headers": headers}


def _address(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidArgument(f"{url!r} is not the address of a server: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise InvalidArgument(
            f"{url!r} is not the address of a server: expected one such as http://127.0.0.1:8080"
        )
    return address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
