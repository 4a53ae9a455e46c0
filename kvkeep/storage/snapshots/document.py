"""What a snapshot file says beside its tensors: that it is of the kinds that the format names."""

from collections.abc import Mapping
from typing import Any

import torch

from kvkeep.cache import Layout
from kvkeep.cache.checks import require, require_flag, require_whole
from kvkeep.cache.state import MAX_CELLS, MAX_NUMBER

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LATEST = 2**40  # seconds since 1970; calendars end somewhere
_MOST_WIDE = 2**20  # layers, KV heads or numbers of a head


def check_document(document: Mapping[str, Any]) -> None:
    """Raises KeyError or ValueError, saying what is wrong, for a document that no kvkeep writes.

    Whether its numbers go together with tensors, or with a model, is not looked at.
    """
    for name, kind in (("model", str), ("codec", str), ("segments", list)):
        _require_kind(name, document[name], kind)
    for name in ("fingerprint", "policy", "settings", "sampler", "layout", "coding"):
        _require_kind(name, document[name], dict)
    for name in ("bits", "notes", "arithmetic"):
        _require_kind(name, document.get(name, {}), dict)
    for name in ("tokens", "serial"):
        require_whole(name, document[name], 0, MAX_NUMBER)
    require_whole("clock", document["clock"], -MAX_NUMBER, MAX_NUMBER)
    created = document["created"]
    require(
        type(created) in (int, float) and 0 <= created <= _LATEST,
        f"created must be seconds since 1970; found {created!r}",
    )
    _check_texts("fingerprint", document["fingerprint"])
    _check_texts("arithmetic", document.get("arithmetic", {}))
    _require_kind("the policy's name", document["policy"]["name"], str)
    require_whole("max_kv_size", document["policy"]["max_kv_size"], 1, MAX_CELLS)
    check_settings(document["settings"], document["tokens"])
    for entry in document["segments"]:
        _check_segment(entry)
    for name, how in document["coding"].items():
        _check_coding(name, how)
    layout_of(document["layout"])
    if any(entry.get("local", False) for entry in document["segments"]):
        layout_of(document["local_layout"])


def check_settings(settings: Mapping[str, Any], tokens: int) -> None:
    """Raises KeyError or ValueError for what are no settings of a session of so many tokens."""
    require_whole("prefill_step", settings["prefill_step"], 1, MAX_NUMBER)
    require_flag("keep_whole_prompt", settings["keep_whole_prompt"])
    pins, spans = settings.get("pins", []), settings.get("spans", {})
    _require_kind("pins", pins, list)
    _require_kind("spans", spans, dict)
    for name, place in spans.items():
        _require_kind("a span's name", name, str)
        require(len(place) == 2, f"span {name!r} must have a start and an end; found {place!r:.80}")
        require_whole(f"the start of span {name!r}", place[0], 0, tokens)
        require_whole(f"the end of span {name!r}", place[1], place[0], tokens)
    _require_kind("the window", settings.get("window", {}), dict)


def layout_of(found: Mapping[str, Any]) -> Layout:
    """Of the cells as they were evaluated. Raises KeyError or ValueError for none."""
    _require_kind("a layout", found, dict)
    for name in ("layers", "kv_heads", "head_dim"):
        require_whole(name, found[name], 1, _MOST_WIDE)
    return Layout(
        found["layers"],
        found["kv_heads"],
        found["head_dim"],
        dtype_of(found["dtype"]),
        torch.device("cpu"),
    )


def dtype_of(name: Any) -> torch.dtype:
    """Raises ValueError for what cells are never of."""
    require(
        isinstance(name, str) and name in _DTYPES,
        f"a dtype must be one of {', '.join(_DTYPES)}; found {name!r}",
    )
    return _DTYPES[name]


def _check_segment(entry: Any) -> None:
    _require_kind("a segment", entry, dict)
    _require_kind("a segment's map", entry["map"], dict)
    require(
        entry["map"].keys() == {"offset", "group"},
        f"a map has an offset and a group; found {list(entry['map'])}",
    )
    require_whole("a map's offset", entry["map"]["offset"], -MAX_NUMBER, MAX_NUMBER)
    require_whole("a map's group", entry["map"]["group"], 1, MAX_CELLS)
    for name in ("limit", "capacity", "length"):
        require_whole(name, entry[name], 1, MAX_CELLS)
    require_whole("start", entry["start"], 0, entry["capacity"] - 1)
    require(entry["length"] <= entry["capacity"], "a segment longer than its storage")
    require(entry["length"] <= entry["limit"], "a segment longer than its limit")
    for name in ("anchor", "frozen", "slot_order"):
        require_flag(name, entry[name])
    for name in ("sealed", "compressed", "ragged", "worth", "local"):
        require_flag(name, entry.get(name, False))
    if entry.get("ragged", False):
        require(entry["compressed"] and entry["frozen"], "ragged cells of tokens")
        whole = entry["capacity"] == entry["length"] and not entry["start"]
        require(whole, "some of ragged cells")
    require(entry.get("ragged", False) or not entry.get("worth", False), "worth of even cells")
    ring = entry["slot_order"]
    require(entry["length"] == entry["capacity"] or not ring, "a ring that is not full")


def _check_coding(name: str, how: Any) -> None:
    _require_kind(f"the coding of {name}", how, dict)
    require(how["codec"] in ("zstd", "int8"), f"{name} is coded in an unknown way")
    dtype_of(how["dtype"])
    _require_kind("shape", how["shape"], list)
    for number in how["shape"]:
        require_whole(f"the shape of {name}", number, 0, MAX_CELLS)


def _check_texts(name: str, found: Mapping[str, Any]) -> None:
    for value in found.values():
        _require_kind(name, value, str)


def _require_kind(name: str, value: Any, kind: type) -> None:
    require(isinstance(value, kind), f"{name} must be a {kind.__name__}; found {value!r:.80}")
