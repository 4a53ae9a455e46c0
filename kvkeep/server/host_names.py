"""Hosts and origins in the form in which browsers send them."""

import re
from ipaddress import IPv6Address

from kvkeep.errors import InvalidArgument

ANY_ORIGIN = "*"
OPAQUE_ORIGIN = "null"  # of files and of frames in a sandbox, which any page can make
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_PORT = re.compile(r":[0-9]*$")
_BRACKETED = re.compile(r"\[([^]]*)\](:[0-9]*)?")
_ORIGIN = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^\s/?#@*]+)/?")
_FILE_ORIGIN = "file://"  # of files in some applications; browsers send `null`
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def host_name(text: str) -> str:
    """Return a host in lower case without its port, an IPv6 address in brackets and short form."""
    text = text.lower()
    bracketed = _BRACKETED.fullmatch(text)
    if not bracketed and text.count(":") < 2:
        return _PORT.sub("", text)
    address = bracketed[1] if bracketed else text
    try:
        return f"[{IPv6Address(address.partition('%')[0])}]"
    except ValueError:
        return text


def parse_host(text: str) -> str:
    """Return a host as `host_name`. Raises InvalidArgument if it is none."""
    name = host_name(text)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{text!r} is not a host name; expected one such as example.com")
    return name


def parse_origin(text: str) -> str:
    """Return an origin without a final slash and default port, or `*`, `null` or `file://`.

    Schemes are in lower case, as are hosts of http and https, as browsers send them. Raises
    InvalidArgument if it is none.
    """
    if text.lower() in (ANY_ORIGIN, OPAQUE_ORIGIN, _FILE_ORIGIN):
        return text.lower()
    match = _ORIGIN.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"{text!r} is not an origin; expected one such as http://example.com")
    scheme, host = match["scheme"].lower(), match["host"]
    if scheme in _DEFAULT_PORTS:
        host = host.lower().removesuffix(_DEFAULT_PORTS[scheme])
    return f"{scheme}://{host}"
