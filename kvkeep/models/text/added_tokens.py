"""Tokens that only tokenizer_config.json or added_tokens.json state, beyond tokenizer.json."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config_fields import is_valid_integer, read_json

_CONFIG_FILE, _LEGACY_FILE = "tokenizer_config.json", "added_tokens.json"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_NAMED_TOKENS = tuple(f"{x}_token" for x in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("extra_special_tokens", "additional_special_tokens")


def add_stated_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the tokens that other files state, under their ids, as transformers does.

    They are added where their ids continue those of tokenizer.json and the embedding has a row for
    them. Warns of those that contradict tokenizer.json, which are left out. folder: of the model.
    Raises BadModelFile for a malformed file.
    """
    config, path = _read_or_empty(folder / _CONFIG_FILE), folder / _CONFIG_FILE
    if config.get("added_tokens_decoder") is not None:
        stated = _tokens_by_id(config, path)
    else:
        path = folder / _LEGACY_FILE
        stated = _legacy_tokens(_read_or_empty(path), config, path)
    added_ids = tokenizer.get_added_tokens_decoder()
    next_id = max([tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added_ids)])
    new, wrong = dict[str, AddedToken](), list[str]()
    for token_id, token in sorted(stated.items()):
        known_id = tokenizer.token_to_id(token.content)
        if known_id == token_id:
            continue
        is_next = token_id == next_id + len(new) and tokenizer.id_to_token(token_id) is None
        if known_id is not None or token.content in new or not token.content:
            wrong.append(f"{token.content!r} ({token_id})")
        elif token_id >= _embedding_rows(folder):
            break
        elif is_next:
            new[token.content] = token
        else:
            wrong.append(f"{token.content!r} ({token_id})")
    tokenizer.add_tokens(list(new.values()))
    if wrong:
        warnings.warn(
            f"{path} states tokens under ids that contradict tokenizer.json, or that do not follow "
            f"its own, and they are left out: {', '.join(wrong[:3])}; correct the file",
            RuntimeWarning,
            stacklevel=2,
        )


def _tokens_by_id(config: Mapping[str, Any], path: Path) -> dict[int, AddedToken]:
    """Return the tokens in `added_tokens_decoder`, by id."""
    entries, named = config["added_tokens_decoder"], _named_tokens(config)
    if not isinstance(entries, dict):
        raise _invalid_error(path, "added_tokens_decoder", entries)
    tokens = {}
    for key, entry in entries.items():
        is_id = key.isdecimal() and len(key) < 12
        if not is_id or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise _invalid_error(path, f"added_tokens_decoder[{key!r:.20}]", entry)
        flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
        flags["special"] = flags.get("special", False) or entry["content"] in named
        tokens[int(key)] = AddedToken(entry["content"], **flags)
    return tokens


def _legacy_tokens(
    ids: Mapping[str, Any], config: Mapping[str, Any], path: Path
) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, by id. config: tokenizer_config.json's contents."""
    special, tokens = _named_tokens(config), {}
    for content, token_id in ids.items():
        if not is_valid_integer(token_id, minimum=0):
            raise _invalid_error(path, f"{content!r:.20}", token_id)
        is_special = content in special
        tokens[token_id] = AddedToken(content, special=is_special, normalized=not is_special)
    return tokens


def _named_tokens(config: Mapping[str, Any]) -> set[str]:
    """Return the texts of tokens with a role, such as EOS, which are special in any case."""
    values = [config.get(name) for name in _NAMED_TOKENS]
    for name in _LISTS:
        if isinstance(listed := config.get(name), list):
            values += listed
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def _embedding_rows(folder: Path) -> float:
    """Return the number of rows of the model's embedding; infinity if no config.json states it."""
    config = _read_or_empty(folder / "config.json")
    text_config = config.get("text_config")
    for values in (text_config, config):
        rows: Any = values.get("vocab_size") if isinstance(values, dict) else None
        if is_valid_integer(rows, minimum=1):
            return float(rows)
    return float("inf")


def _invalid_error(path: Path, what: str, value: object) -> BadModelFile:
    return BadModelFile(f"{path}: {what} is no token: {value!r:.60}; fetch the model again")


def _read_or_empty(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}
