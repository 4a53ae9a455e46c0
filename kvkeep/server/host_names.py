"""Hosts and origins in the form in which browsers send them."""

import re
from ipaddress import IPv6Address

from kvkeep.errors import InvalidArgument

ANY_ORIGIN = "*"
OPAQUE_ORIGIN = "null"  # of files and of frames in a sandbox, which any page can make
_NAME = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]")
_PORT = re.compile(r":[0-9]*$")
_BRACKETED = re.compile(r"\[([^]]*)\](:[0-9]*)?")
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^\s/?#@*]+)/?")
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
    """Return an origin in lower case without a final slash and default port, or `*` or `null`.

    Raises InvalidArgument if it is none.
    """
    text = text.lower()
    if text in (ANY_ORIGIN, OPAQUE_ORIGIN):
        return text
    match = _ORIGIN.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"{text!r} is not an origin; expected one such as http://example.com")
    scheme, host = match["scheme"], match["host"]
    return f"{scheme}://{host.removesuffix(_DEFAULT_PORTS.get(scheme, ''))}"
