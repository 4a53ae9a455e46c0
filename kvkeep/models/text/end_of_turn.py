"""The tokens that end a generation or a message, from all files of a model.

The files often disagree.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvkeep.errors import KvkeepError
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.text.codec import TextCodec

# Marks a message in a rendering. Letters only, so that no template trims it.
_MARK = "kvkeepmessage"
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_END_TOKEN_FIELDS = ("eos_token", "eot_token", "eom_token")
# Token texts that mean an end in every vocabulary that has them, for files that name a wrong token
# or omit one. Others count only if the files name them: </s> (Gemma has it for HTML) and <eos> may
# be words of a text, and an answer of several files needs the file separators of code models,
# <|fim_pad|> and <|file_sep|>, at which llama.cpp ends.
_WELL_KNOWN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<turn|>", "<|tool_response>"),  # Gemma 4: end of a turn, and of a tool call
)
# In gpt-oss, <|end|> ends a message in one channel, and an answer has several such messages.
_MESSAGE_END, _CHANNEL, _ANSWER_ENDS = "<|end|>", "<|channel|>", ("<|return|>", "<|call|>")


def end_token_ids(spec: ModelSpec, codec: TextCodec) -> tuple[int, ...]:
    """Return the ids of the tokens that end a generation, `spec.eos_token_ids` first.

    They are the union of the ids in config.json, generation_config.json and the tokenizer's config,
    of the token with which the chat template closes an assistant's turn, and of well-known end
    tokens in the vocabulary. Unreadable files are ignored.
    """
    ids = [
        *spec.eos_token_ids,
        *_config_end_ids(codec.folder),
        *_tokenizer_config_end_ids(codec),
        *_template_end_ids(codec),
        *_vocabulary_ids(codec, _WELL_KNOWN_ENDS),
        *_vocabulary_ids(codec, _ANSWER_ENDS if _uses_channels(codec) else (_MESSAGE_END,)),
    ]
    return tuple(dict.fromkeys(ids))


def message_end_ids(spec: ModelSpec, codec: TextCodec) -> frozenset[int]:
    """Return the ids of the tokens that end a message in the chat template, of any role.

    They are the first control tokens after a message's text, such as <|im_end|>, [/INST] after a
    user's message, or <|assistant|> if nothing closes a message; and those that end a generation.
    None for a model without a template, or whose template writes no control tokens there.
    """
    contents = {"role": "user", "content": _MARK}, {"role": "assistant", "content": "-"}
    chats = [[{"role": "system", "content": _MARK}, *contents], list(contents)]
    user_end_ids = {token_id for chat in chats for token_id in _ids_after_mark(codec, chat)}
    answer_end_ids = _template_end_ids(codec)
    if not user_end_ids and not answer_end_ids:
        return frozenset()
    return frozenset([*user_end_ids, *answer_end_ids, *end_token_ids(spec, codec)])


def _config_end_ids(folder: Path) -> Iterator[int]:
    for name in _CONFIG_FILES:
        config = _read_json_or_empty(folder / name)
        text_config = config.get("text_config")
        for fields in (config, text_config if isinstance(text_config, dict) else {}):
            value = fields.get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if type(token_id) is int and token_id >= 0:
                    yield token_id


def _tokenizer_config_end_ids(codec: TextCodec) -> Iterator[int]:
    for name in _TOKENIZER_CONFIG_FILES:
        config = _read_json_or_empty(codec.folder / name)
        entries = [config.get(field) for field in _END_TOKEN_FIELDS]
        texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
        yield from _vocabulary_ids(codec, texts)


def _template_end_ids(codec: TextCodec) -> list[int]:
    """Return the ids of tokens that the chat template writes after an assistant's last message.

    If nothing closes it, the first token of the user's next message ends a turn (GLM's <|user|>);
    not in gpt-oss, which closes its last message with <|return|>, and earlier ones with <|end|>.
    """
    question = {"role": "user", "content": "-"}
    answer = {"role": "assistant", "content": _MARK}
    chats = [[question, answer], [question, answer, question]]
    for messages in chats[:1] if _uses_channels(codec) else chats:
        if ids := _ids_after_mark(codec, messages):
            return ids
    return []


def _ids_after_mark(codec: TextCodec, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of control tokens that the template writes right after marked contents.

    None if it refuses the messages.
    """
    try:
        rendered = codec.chat(messages, add_generation_prompt=False).sealed
        end_ids = [_leading_added_id(codec, s) for s in rendered.split(_MARK)[1:]]
    except KvkeepError:
        return []
    return [token_id for token_id in end_ids if token_id is not None]


def _leading_added_id(codec: TextCodec, sealed: str) -> int | None:
    """Return the first token of a sealed text that is not white space, if it is an added one."""
    added_tokens = codec.tokenizer.get_added_tokens_decoder()
    ids = codec.encode_sealed(sealed)
    first_id = next((token_id for token_id in ids if codec.token_bytes(token_id).strip()), None)
    return first_id if first_id in added_tokens else None


def _uses_channels(codec: TextCodec) -> bool:
    return codec.tokenizer.token_to_id(_CHANNEL) is not None


def _vocabulary_ids(codec: TextCodec, token_texts: Iterable[object]) -> Iterator[int]:
    """Yield the ids of the token texts that the vocabulary has."""
    for text in token_texts:
        token_id = codec.tokenizer.token_to_id(text) if isinstance(text, str) else None
        if token_id is not None:
            yield token_id


def _read_json_or_empty(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path) if path.exists() else {}
    except KvkeepError:
        return {}
