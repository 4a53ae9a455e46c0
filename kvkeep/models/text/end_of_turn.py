"""The tokens that end a generation: end of a text, of a turn, or of a tool call.

Model files often disagree on them, so all sources are combined.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.text.codec import TextCodec

# Marks the assistant's message in a rendering. Letters only, so that no template trims it.
_MARK = "kvkeepanswer"
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_ROLES = ("eos_token", "eot_token", "eom_token")
# Token texts that mean an end in every vocabulary that has them, for files that name a wrong token
# or omit one. The template shows the end of a turn, but not that of a text or of a tool call.
# Left out, so that they count only if the files name them: words that a text may contain, such as
# </s> (Gemma has it for HTML) or <eos>, and the file separators of code models, <|fim_pad|> and
# <|file_sep|>, at which llama.cpp ends but which an answer of several files needs.
_WELL_KNOWN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<turn|>", "<|tool_response>"),  # Gemma 4: end of a turn, and of a tool call
)
# In gpt-oss, <|end|> ends a message in one channel, and an answer has several such messages.
_END, _CHANNEL, _CHANNEL_ENDS = "<|end|>", "<|channel|>", ("<|return|>", "<|call|>")


def end_token_ids(spec: ModelSpec, text: TextCodec) -> tuple[int, ...]:
    """Return the ids of the tokens that end a generation, `spec.eos_token_ids` first.

    They are the union of the ids in config.json, generation_config.json and the tokenizer's config,
    of the token with which the chat template closes an assistant's turn, and of well-known end
    tokens in the vocabulary. For example, a base model's config often names the end of a text, and
    the tokenizer of its chat version the end of a turn. Unreadable files are ignored.
    """
    ids = [
        *spec.eos_token_ids,
        *_config_ids(text.folder),
        *_tokenizer_config_ids(text),
        *_template_end_ids(text),
        *_ids_of(text, _WELL_KNOWN_ENDS),
        *_ids_of(text, _CHANNEL_ENDS if _uses_channels(text) else (_END,)),
    ]
    return tuple(dict.fromkeys(ids))


def _config_ids(folder: Path) -> Iterator[int]:
    for name in _CONFIGS:
        config = _read_json_or_empty(folder / name)
        text_config = config.get("text_config")
        for holder in (config, text_config if isinstance(text_config, dict) else {}):
            value = holder.get("eos_token_id")
            for index in value if isinstance(value, list) else [value]:
                if type(index) is int and index >= 0:
                    yield index


def _tokenizer_config_ids(text: TextCodec) -> Iterator[int]:
    for name in _TOKENIZER_CONFIGS:
        config = _read_json_or_empty(text.folder / name)
        values = [config.get(role) for role in _ROLES]
        tokens = [value.get("content") if isinstance(value, dict) else value for value in values]
        yield from _ids_of(text, tokens)


def _template_end_ids(text: TextCodec) -> list[int]:
    """Return the token that the chat template writes after an assistant's message.

    First with that message as the last one. If nothing closes it, with a user's message after it:
    the model then ends its turn with the first token of the next one (GLM's <|user|>). gpt-oss is
    excepted: it closes its last message with <|return|>, and earlier ones with <|end|>.
    """
    question, answer = ({"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK})
    chats = [[question, answer], [question, answer, question]]
    for messages in chats[:1] if _uses_channels(text) else chats:
        try:
            rendered = text.chat(messages, add_generation_prompt=False).sealed
            ends = [_leading_added_token(text, after) for after in rendered.split(_MARK)[1:]]
        except KvkeepError:
            continue
        if ids := [index for index in ends if index is not None]:
            return ids
    return []


def _leading_added_token(text: TextCodec, sealed: str) -> int | None:
    """Return the added token at the start of a sealed text, after white space, or None."""
    added = text.tokenizer.get_added_tokens_decoder()
    ids = text.encode_sealed(sealed)
    first = next((index for index in ids if text.token_bytes(index).strip()), None)
    return first if first in added else None


def _uses_channels(text: TextCodec) -> bool:
    return text.tokenizer.token_to_id(_CHANNEL) is not None


def _ids_of(text: TextCodec, tokens: Iterable[object]) -> Iterator[int]:
    """Yield the ids of those token texts that the vocabulary has."""
    for token in tokens:
        index = text.tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is not None:
            yield index


def _read_json_or_empty(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path) if path.exists() else {}
    except KvkeepError:
        return {}
