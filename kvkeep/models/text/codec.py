"""Text to token ids and back, as the model's own tokenizer has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from kvkeep import validation
from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.models.text.byte_fallback import ByteTokens
from kvkeep.models.text.chat_template import checked_messages, checked_tools, render_chat
from kvkeep.models.text.control_tokens import ChatText, ControlTokens
from kvkeep.models.text.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are not, or not yet, a character
_MARK = "kvkeepgoeson"  # stands for what follows in a rendering; letters only, so nothing trims it
_LONGEST_WAIT = 64  # tokens; a character has 4 bytes at most, so these are noise, not text


@dataclass(frozen=True)
class TextCodec:
    """The tokenizer and the chat template of the model in a folder."""

    folder: Path
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises BadModelFile if tokenizer.json is missing, empty or broken."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise BadModelFile(
                f"{folder} has no tokenizer.json; fetch the model again, or save its tokenizer "
                "in that format"
            )
        # The library raises bare Exception for all that can be wrong with the file.
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise BadModelFile(
                f"{path} is not a tokenizer ({error}); fetch the model again"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(folder, tokenizer)

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text. A model may have more rows than that, as padding."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def opening_ids(self) -> list[int]:
        """What the model was trained to see once before a plain text: BOS, or for many nothing.

        A chat template writes its own, so this is for text that went through none.
        """
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        added = list(zip(encoded.ids, encoded.special_tokens_mask, strict=True))
        return [index for index, _ in takewhile(lambda pair: pair[1] == 1, added)]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of the text and of nothing else: no BOS is added.

        special: the text of a special token, such as <|im_start|>, becomes that token. By default
        it is text like any other, so that nobody who writes it can end a turn or begin one. What
        `chat` gives needs no `special`: it knows which tokens the template wrote.

        Bytes that the vocabulary lacks are left out, as the model's own tokenizer does: SmolLM2 has
        no token for six control characters and for the planes of Unicode that hold no script.

        Raises InvalidArgument for text that is not Unicode (half of a surrogate pair).
        """
        if isinstance(text, ChatText):
            return self.encode_sealed(text.sealed)
        text = validation.text("text", text)
        if special:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.encode_sealed(text)

    def encode_sealed(self, text: str) -> list[int]:
        """Token ids of `ChatText.sealed`, or of a part of one."""
        return self._control.encode(text)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of token ids; ids beyond the vocabulary have none.

        Raises InvalidArgument for a negative id.
        """
        if any(index < 0 for index in ids):
            raise InvalidArgument(f"token ids are numbers from 0 up, found {min(ids)}")
        return self.tokenizer.decode(self._bytes.mended(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token inside a text: with the space that it opens with, and of half a
        character its own part. b"" for an id beyond the vocabulary.

        Raises InvalidArgument for a negative id.
        """
        if token < 0:
            raise InvalidArgument(f"token ids are numbers from 0 up, found {token}")
        return self._token_bytes.of(token)

    def is_control(self, token: int) -> bool:
        """Whether a token is special, such as <|im_end|>: generated text is without it."""
        return token in self._control.ids

    def decode_inside(self, ids: Sequence[int]) -> str:
        """The text of tokens that others come before: a space they open with is not lost."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def piece_stream(self, skip_special: bool = False) -> "PieceStream":
        """A decoder for ids that come one at a time."""
        return PieceStream(self, skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatText:
        """The messages as text in the model's own format; feed it, or encode it with `encode`.

        What the template writes is special, and nothing in a message or a tool is: see `ChatText`.

        messages: each with "role" and "content". add_generation_prompt: end with the opening of
        the assistant's turn. tools: the JSON schemas of what the model may call, for templates that
        know of tools; others leave them out.

        Raises UnsupportedModel if the model has no template, InvalidArgument for messages or tools
        that are malformed or that the template refuses.
        """
        guarded = self._control.stand_in(checked_messages(messages))
        schemas = self._control.stand_in(checked_tools(tools))
        rendered = render_chat(self.folder, guarded, add_generation_prompt, schemas)
        return self._control.chat_text(validation.text("the chat", rendered))

    def chat_to_continue(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The tokens of a chat whose last message, the assistant's, is open: it goes on from there.

        Raises what `chat` does, and InvalidArgument where the last message is another one's, or
        where the template does not write it as it is.
        """
        given = checked_messages(messages)
        if not given or given[-1]["role"] != "assistant":
            raise InvalidArgument("the last message must be the assistant's for it to go on")
        last = {**given[-1], "content": given[-1].get("content", "") + _MARK}
        sealed = self.chat([*given[:-1], last], False, tools).sealed
        before, found, _ = sealed.rpartition(_MARK)
        if not found:
            raise InvalidArgument("the model's chat template does not let a message go on")
        return self.encode_sealed(before)

    @cached_property
    def _bytes(self) -> ByteTokens:
        return ByteTokens(self.tokenizer)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)


class PieceStream:
    """Text as tokens arrive. What it gave, joined, is always a prefix of the whole decoded text.

    A token may end inside a character: what is not complete yet is held back.
    """

    def __init__(self, codec: TextCodec, skip_special: bool) -> None:
        self._codec = codec
        self._skip_special = skip_special
        # Decoders treat the first token of a text apart (a leading space goes), so tokens are
        # decoded after the last ones that gave text, and the text of those is cut off.
        self._context: list[int] = []
        self._context_length = 0
        self._pending: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes, often one piece, sometimes none."""
        self._pending.append(token_id)
        text = self._pending_text()
        new = text[self._given :]
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_WAIT:
            # The last character may be half of one. Those before it can no longer change.
            self._given = len(text) - 1
            return new[:-1]
        if text:
            self._close()
        return new

    def flush(self) -> str:
        """What was held back, at the end of the stream: half a character comes as U+FFFD."""
        new = self._pending_text()[self._given :]
        if self._pending:
            self._close()
        return new

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._context_length :]

    def _close(self) -> None:
        self._context = self._pending
        self._context_length = len(self._decode(self._context))
        self._pending = []
        self._given = 0

    def _decode(self, ids: list[int]) -> str:
        return self._codec.decode(ids, self._skip_special)
