"""Encoding and decoding of text with a model's tokenizer and chat template."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from kvkeep import validation
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.text.added_tokens import add_stated_tokens
from kvkeep.models.text.chat_template import checked_messages, checked_tools, render_chat
from kvkeep.models.text.control_tokens import ChatText, ControlTokens, encoded_ids
from kvkeep.models.text.tekken import correct_words
from kvkeep.models.text.template_files import TemplateFiles
from kvkeep.models.text.token_bytes import MAX_TOKEN_ID, TokenBytes

_REPLACEMENT_CHARACTER = "\ufffd"  # decoded from bytes that are not (or not yet) a character
# Tokens after which incomplete text is returned: a character has at most 4 bytes, so it is noise.
_MAX_PENDING_TOKENS = 64


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer and chat template of the model in a folder."""

    folder: Path
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Load the tokenizer. Raises BadModelFile if tokenizer.json is missing, empty or broken.

        Warns of tokens that other files state in contradiction to it.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise BadModelFile(
                f"{folder} has no tokenizer.json, and kvkeep reads no other tokenizer of a folder: "
                "save it in that format (`save_pretrained` of transformers does), or use a GGUF "
                "file of the model"
            )
        # The library raises bare Exception for every fault of the file.
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise BadModelFile(
                f"{path} is not a valid tokenizer ({error}); fetch the model again"
            ) from error
        add_stated_tokens(tokenizer, folder)
        correct_words(tokenizer, folder)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(folder, tokenizer)

    @property
    def vocab_size(self) -> int:
        """The number of tokens with a text. A model may have more rows, as padding."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def opening_ids(self) -> list[int]:
        """The ids before a plain text, such as BOS; often empty. A chat template writes its own."""
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        return encoded.ids[: len(list(takewhile(bool, encoded.special_tokens_mask)))]

    @property
    def closing_ids(self) -> list[int]:
        """The ids after a whole text, which embedding models are trained with; mostly none."""
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        count = len(list(takewhile(bool, reversed(encoded.special_tokens_mask))))
        return encoded.ids[len(encoded.ids) - count :]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of a text, without BOS.

        special: encode the text of a special token, such as <|im_start|>, as that token. By default
        it is plain text, so that user input cannot end or begin a turn. The result of `chat`
        records which tokens the template wrote, and needs no `special`.

        Bytes that the vocabulary lacks are left out, as by the model's own tokenizer. Raises
        InvalidArgument for text that is not Unicode (half of a surrogate pair).
        """
        if isinstance(text, ChatText):
            return self.encode_sealed(text.sealed)
        text = validation.text("text", text)
        if special:
            return encoded_ids(self.tokenizer, text)
        return self.encode_sealed(text)

    def encode_sealed(self, text: str) -> list[int]:
        """Return the token ids of a text with secret control tokens, as `ChatText.sealed`."""
        return self._control_tokens.encode(text)

    def unsealed(self, sealed: str) -> ChatText:
        """Return the chat text of a sealed text."""
        return self._control_tokens.unsealed(sealed)

    def control_places(self, sealed: str, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and id of each control token between two places of a sealed text."""
        return self._control_tokens.places(sealed, start, end)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of token ids, "" of ids beyond the vocabulary. Negative ids raise."""
        if any(token < 0 for token in ids):
            raise InvalidArgument(f"token ids must be 0 or more, found {min(ids)}")
        ids = [token for token in ids if token <= MAX_TOKEN_ID]
        valid_ids = self._token_bytes.replace_invalid_byte_tokens(ids)
        return self.tokenizer.decode(valid_ids, skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside a text, with its leading space.

        For a part of a character, the bytes of that part; b"" for an id beyond the vocabulary.
        Raises InvalidArgument for a negative id.
        """
        if token < 0:
            raise InvalidArgument(f"token ids must be 0 or more, found {token}")
        return self._token_bytes.get(token)

    def is_control(self, token: int) -> bool:
        """Whether a token is special, such as <|im_end|>, and so not part of generated text."""
        return token in self._control_tokens.ids

    def control_text(self, token: int) -> str:
        """Return the text of a special token in the vocabulary; "" for any other id."""
        return (self.tokenizer.id_to_token(token) or "") if self.is_control(token) else ""

    @property
    def control_texts(self) -> frozenset[str]:
        """The texts of all special tokens."""
        return frozenset(map(self.control_text, self._control_tokens.ids))

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that follow others: with the first one's leading space."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def piece_stream(self, skip_special: bool = False) -> "PieceStream":
        """Return a decoder for a stream of token ids. skip_special: leave out special tokens."""
        return PieceStream(self, skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatText:
        """Render messages with the model's chat template; feed the result, or `encode` it.

        Only special tokens that the template writes are encoded as such, none in messages and
        tools: see `ChatText`.

        messages: each with "role" and "content". add_generation_prompt: end with the opening of
        the assistant's turn. tools: JSON schemas of functions that the model may call; templates
        without tool support ignore them. template_kwargs: more variables for the template, such as
        `enable_thinking`.

        Raises UnsupportedModel if the model has no template, InvalidArgument for messages or tools
        that are malformed or that the template refuses.
        """
        control_tokens, checked = self._control_tokens, checked_messages(messages)
        tool_list = checked_tools(tools)
        source = self.template_files.source(with_tools=tools is not None)
        texts = control_tokens.template_texts(source)
        try:
            rendered = render_chat(
                self.template_files.tokenizer_config,
                texts,
                control_tokens.with_placeholders(checked),
                add_generation_prompt,
                control_tokens.with_placeholders(tool_list),
                control_tokens.with_placeholders(template_kwargs or {}),
            )
        except InvalidArgument as error:  # may quote the template's texts
            raise InvalidArgument(control_tokens.without_secrets(str(error))) from error.__cause__
        roles = {message["role"] for message in checked}
        return control_tokens.chat_text(validation.text("the chat", rendered), texts, roles)

    def template_text(self, text: str) -> ChatText:
        """Return a text in which the texts of control tokens are these tokens.

        For text that no user wrote, to add to the result of `chat`.
        """
        return self._control_tokens.chat_text(text)

    @cached_property
    def template_files(self) -> TemplateFiles:
        """The model's templates, read once: the folder may be removed. Raises BadModelFile."""
        return TemplateFiles.read(self.folder)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        # The same in all threads, as each has secret names of its own: since Python 3.12 two
        # threads may be here at once.
        shared: dict[str, ControlTokens] = vars(self)
        return shared.setdefault("_control_tokens", ControlTokens(self.tokenizer))


class PieceStream:
    """An incremental decoder, which holds back a character until all of its tokens are there.

    The returned pieces, joined, are always a prefix of the decoded text.
    """

    def __init__(self, codec: TextCodec, skip_special: bool) -> None:
        self._codec = codec
        self._skip_special = skip_special
        # Decoders strip the leading space of a text, so new tokens are decoded behind the last ones
        # that gave text, whose text is then cut off.
        self._context_ids: list[int] = []
        self._context_chars = 0
        self._pending_ids: list[int] = []
        self._returned_chars = 0  # of the pending tokens' text

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty."""
        self._pending_ids.append(token_id)
        text = self._decode_pending()
        new_text = text[self._returned_chars :]
        if text.endswith(_REPLACEMENT_CHARACTER) and len(self._pending_ids) < _MAX_PENDING_TOKENS:
            # The last character may be incomplete. Earlier ones can no longer change.
            self._returned_chars = len(text) - 1
            return new_text[:-1]
        if text:
            self._start_context()
        return new_text

    def flush(self) -> str:
        """Return the text held back, before a break or at the end. Half a character is U+FFFD.

        Tokens that come later do not complete it.
        """
        new_text = self._decode_pending()[self._returned_chars :]
        if new_text and self._context_ids:
            self._pending_ids, self._returned_chars = [], 0
        elif new_text:
            self._start_context()
        return new_text

    def _decode_pending(self) -> str:
        return self._decode(self._context_ids + self._pending_ids)[self._context_chars :]

    def _start_context(self) -> None:
        """Make the pending tokens, all of whose text was returned, the context of the next ones."""
        self._context_ids = self._pending_ids
        self._context_chars = len(self._decode(self._context_ids))
        self._pending_ids = []
        self._returned_chars = 0

    def _decode(self, ids: list[int]) -> str:
        return self._codec.decode(ids, self._skip_special)
