"""The tokens that end a text, a turn or a message to a tool, from all that a model's files say."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.text.codec import TextCodec

_MARK = "kvkeepanswer"  # stands for an answer in a rendering; letters only, so nothing trims it
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_ROLES = ("eos_token", "eot_token", "eom_token")
# Texts that mean an end in every vocabulary that has them, for files that name a wrong token or
# leave one out. The template shows the end of a turn, but neither that of a text nor that of a
# message which calls a tool. Words that a text may hold, such as </s> (which Gemma has for HTML) or
# <eos>, count where the files name them, and so do the tokens that part files for code models,
# <|fim_pad|> and <|file_sep|>: llama.cpp ends at these, and an answer of several files needs them.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<turn|>", "<|tool_response>"),  # Gemma 4: of a turn, and of a call that awaits its result
)
# In gpt-oss, <|end|> ends a message in one of its channels, and an answer has several of these.
_END, _CHANNEL, _ENDS_OF_CHANNELS = "<|end|>", "<|channel|>", ("<|return|>", "<|call|>")


def end_token_ids(spec: ModelSpec, text: TextCodec) -> tuple[int, ...]:
    """Ids of the tokens that end a generation, those of `spec.eos_token_ids` first.

    The union of what config.json, generation_config.json and the tokenizer's config say, of the
    token by which the chat template closes an assistant's turn, and of the vocabulary's well-known
    ends. Files often disagree: a base model's config names the end of a text, and the tokenizer of
    its chat version the end of a turn. What cannot be read counts as saying nothing.
    """
    ids = [
        *spec.eos_token_ids,
        *_configured(text.folder),
        *_of_tokenizer(text),
        *_closing(text),
        *_well_known(text),
    ]
    return tuple(dict.fromkeys(ids))


def _configured(folder: Path) -> Iterator[int]:
    for name in _CONFIGS:
        config = _read(folder / name)
        part = config.get("text_config")
        for each in (config, part if isinstance(part, dict) else {}):
            value = each.get("eos_token_id")
            for index in value if isinstance(value, list) else [value]:
                if type(index) is int and index >= 0:
                    yield index


def _of_tokenizer(text: TextCodec) -> Iterator[int]:
    for name in _TOKENIZER_CONFIGS:
        config = _read(text.folder / name)
        for role in _ROLES:
            value = config.get(role)
            token = value.get("content") if isinstance(value, dict) else value
            yield from _ids(text, token)


def _closing(text: TextCodec) -> list[int]:
    """The token that the chat template writes behind what the assistant says.

    As the last message, and where nothing closes that, before a user's: the first token of the next
    turn (GLM's <|user|>) is what the model ends its own with. Not so with channels: gpt-oss closes
    its last message with <|return|>, and those before it with <|end|>.
    """
    question, answer = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK})
    chats = [[question, answer], [question, answer, question]]
    for messages in chats[:1] if _has_channels(text) else chats:
        try:
            rendered = text.chat(messages, add_generation_prompt=False).sealed
            ends = [_first_added(text, after) for after in rendered.split(_MARK)[1:]]
        except KvkeepError:
            continue
        if found := [index for index in ends if index is not None]:
            return found
    return []


def _first_added(text: TextCodec, sealed: str) -> int | None:
    """The added token that a part of a rendering begins with, white space aside."""
    added = text.tokenizer.get_added_tokens_decoder()
    ids = text.encode_sealed(sealed)
    first = next((index for index in ids if text.token_bytes(index).strip()), None)
    return first if first in added else None


def _well_known(text: TextCodec) -> Iterator[int]:
    for token in _ENDS:
        yield from _ids(text, token)
    for token in _ENDS_OF_CHANNELS if _has_channels(text) else (_END,):
        yield from _ids(text, token)


def _has_channels(text: TextCodec) -> bool:
    return bool(_ids(text, _CHANNEL))


def _ids(text: TextCodec, token: Any) -> list[int]:
    index = text.tokenizer.token_to_id(token) if isinstance(token, str) else None
    return [] if index is None else [index]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path) if path.exists() else {}
    except KvkeepError:
        return {}
