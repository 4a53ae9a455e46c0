"""Checks of the JSON document in a snapshot file: types and ranges of its fields."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from kvkeep.cache import Layout
from kvkeep.cache.checkpoint import MAX_CHECKPOINTS
from kvkeep.cache.checks import require, require_bool, require_int
from kvkeep.cache.state import MAX_CELLS, MAX_EXACT_INT

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OBJECT_FIELDS = ("fingerprint", "policy", "settings", "sampler", "layout", "coding")
_FIELD_TYPES = {"model": str, "codec": str, "segments": list, **dict.fromkeys(_OBJECT_FIELDS, dict)}
_MAX_CREATED = 2**40  # seconds since 1970; later times overflow calendars
_LAYOUT_SIZES = ("layers", "kv_heads", "head_dim")
_MAX_LAYOUT_SIZE = 2**20  # of each of them


def check_document(document: Mapping[str, Any]) -> None:
    """Raise LookupError, TypeError or ValueError for a document that kvkeep would not write.

    Does not check that the document agrees with the tensors or with a model.
    """
    for name, expected_type in _FIELD_TYPES.items():
        _require_type(name, document[name], expected_type)
    _require_type("rounded", document.get("rounded", ""), str)
    for name in ("bits", "notes", "arithmetic"):
        _require_type(name, document.get(name, {}), dict)
    for name in ("tokens", "serial"):
        require_int(name, document[name], 0, MAX_EXACT_INT)
    require_int("clock", document["clock"], -MAX_EXACT_INT, MAX_EXACT_INT)
    created = document["created"]
    require(
        type(created) in (int, float) and 0 <= created <= _MAX_CREATED,
        f"created must be seconds since 1970; found {created!r}",
    )
    for name in ("fingerprint", "arithmetic"):
        for value in document.get(name, {}).values():
            _require_type(name, value, str)
    _require_type("the policy's name", document["policy"]["name"], str)
    require_int("max_kv_size", document["policy"]["max_kv_size"], 1, MAX_CELLS)
    check_settings(document["settings"], document["tokens"])
    for entry in document["segments"]:
        check_segment(entry)
    for name, encoding in document["coding"].items():
        _check_encoding(name, encoding)
    layout_of(document["layout"])
    if any(entry.get("local", False) for entry in document["segments"]):
        layout_of(document["local_layout"])
    if "checkpoints" in document:
        _check_checkpoints(document["checkpoints"])


def check_settings(settings: Mapping[str, Any], token_count: int) -> None:
    """Check the settings of a session of `token_count` tokens. Raises as `check_document`."""
    require_int("prefill_step", settings["prefill_step"], 1, MAX_EXACT_INT)
    require_bool("keep_whole_prompt", settings["keep_whole_prompt"])
    pins, spans = settings.get("pins", []), settings.get("spans", {})
    _require_type("pins", pins, list)
    _require_type("spans", spans, dict)
    for name, span in spans.items():
        _require_type("a span's name", name, str)
        require(len(span) == 2, f"span {name!r} must have a start and an end; found {span!r:.80}")
        require_int(f"the start of span {name!r}", span[0], 0, token_count)
        require_int(f"the end of span {name!r}", span[1], span[0], token_count)
    _require_type("the window", settings.get("window", {}), dict)


def layout_entry(layout: Layout) -> dict[str, Any]:
    """Return the entry of a layout, for `layout_of`."""
    sizes = {name: getattr(layout, name) for name in _LAYOUT_SIZES}
    return {**sizes, "dtype": str(layout.dtype).removeprefix("torch.")}


def layout_of(entry: Mapping[str, Any]) -> Layout:
    """Return the layout that an entry describes. Raises as `check_document`."""
    _require_type("a layout", entry, dict)
    sizes = {name: entry[name] for name in _LAYOUT_SIZES}
    for name, size in sizes.items():
        require_int(name, size, 1, _MAX_LAYOUT_SIZE)
    return Layout(**sizes, dtype=dtype_of(entry["dtype"]), device=torch.device("cpu"))


def dtype_of(name: Any) -> torch.dtype:
    """Raises ValueError for a name that is not a dtype of cells."""
    require(
        isinstance(name, str) and name in _DTYPES,
        f"a dtype must be one of {', '.join(_DTYPES)}; found {name!r}",
    )
    return _DTYPES[name]


def check_segment(entry: Any) -> None:
    """Check a segment's entry, as `segment_entry` makes it: its fields, alone and together.

    Raises as `check_document`.
    """
    _require_type("a segment", entry, dict)
    _require_type("a segment's map", entry["map"], dict)
    require(
        entry["map"].keys() == {"offset", "group"},
        f"a map must have an offset and a group; found {list(entry['map'])}",
    )
    require_int("a map's offset", entry["map"]["offset"], -MAX_EXACT_INT, MAX_EXACT_INT)
    require_int("a map's group", entry["map"]["group"], 1, MAX_CELLS)
    for name in ("limit", "capacity", "length"):
        require_int(name, entry[name], 1, MAX_CELLS)
    require_int("start", entry["start"], 0, entry["capacity"] - 1)
    require(entry["length"] <= entry["capacity"], "a segment longer than its storage")
    require(entry["length"] <= entry["limit"], "a segment longer than its limit")
    for name in ("anchor", "frozen", "slot_order"):
        require_bool(name, entry[name])
    # worth: scores of cells
    for name in ("sealed", "compressed", "ragged", "worth", "residual", "local"):
        require_bool(name, entry.get(name, False))
    is_full = entry["length"] == entry["capacity"]
    if entry.get("ragged", False):
        require(entry["compressed"] and entry["frozen"], "ragged cells must be compressed")
        require(is_full and not entry["start"], "incomplete ragged cells")
    require(entry.get("ragged", False) or not entry.get("worth", False), "scores of uniform cells")
    is_marked = entry.get("residual", False)
    require(entry.get("ragged", False) or not is_marked, "residual cells among uniform ones")
    require(is_full or not entry["slot_order"], "a ring that is not full")


def _check_checkpoints(checkpoints: Any) -> None:
    """Check the entry of all checkpoints, as `checkpoints_entry` makes it."""
    _require_type("checkpoints", checkpoints, dict)
    for name in ("max_bytes", "branch"):
        require_int(name, checkpoints[name], 0, MAX_EXACT_INT)
    windows, entries = checkpoints["windows"], checkpoints["entries"]
    _require_type("windows", windows, list)
    _require_type("the entries of checkpoints", entries, list)
    _require_type("the ends of an answer", checkpoints.get("answer_ends", []), list)
    require(len(entries) <= MAX_CHECKPOINTS, f"{len(entries)} checkpoints")
    for length in windows:
        require_int("the length of a window", length, 1, MAX_CELLS)
    for entry in entries:
        _require_type("a checkpoint", entry, dict)
        require_int("the tokens of a checkpoint", entry["tokens"], 1, MAX_EXACT_INT)
        require_int("the clock of a checkpoint", entry["clock"], -MAX_EXACT_INT, MAX_EXACT_INT)
        for name in ("branches", "session_states"):
            require_bool(name, entry.get(name, False))
        _require_type("the segments of a checkpoint", entry["segments"], list)
        for segment in entry["segments"]:
            check_segment(segment)
            require(not segment.get("compressed", False), "compressed cells in a window")
            _check_runs(segment["cells"])


def _check_runs(runs: Any) -> None:
    """Check the runs of cells that a window consists of: name, first cell, count."""
    _require_type("the cells of a window", runs, list)
    require(bool(runs), "a window without cells")
    for run in runs:
        _require_type("a run of cells", run, list)
        name, first, count = run
        _require_type("the name of cells", name, str)
        require_int("the first cell of a run", first, 0, MAX_CELLS)
        require_int("the cells of a run", count, 1, MAX_CELLS)


def _check_encoding(name: str, encoding: Any) -> None:
    """Check how a tensor is encoded, as `codec.encode` returns it. name: of the tensor."""
    _require_type(f"the coding of {name}", encoding, dict)
    codecs = ("zstd", "int8", "small", "smaller")
    require(encoding["codec"] in codecs, f"{name} has an unknown codec")
    dtype_of(encoding["dtype"])
    _require_type("shape", encoding["shape"], list)
    for size in encoding["shape"]:
        require_int(f"the shape of {name}", size, 0, MAX_CELLS)
    if encoding["codec"] in ("small", "smaller"):
        require(len(encoding["shape"]) == 4, f"{name} is not of cells of all heads")
        require(
            re.fullmatch("[0-9a-f]{32}", encoding["basis"]) is not None,
            f"{name} has the basis {encoding['basis']!r:.80}",
        )
        _require_type(f"the frames of {name}", encoding["frames"], list)
        for size in encoding["frames"]:
            require_int(f"a frame of {name}", size, 1, MAX_EXACT_INT)


def _require_type(name: str, value: Any, expected: type) -> None:
    message = f"{name} must be a {expected.__name__}; found {value!r:.80}"
    require(isinstance(value, expected), message)
