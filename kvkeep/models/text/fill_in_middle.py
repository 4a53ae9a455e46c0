"""Prompts that have a model fill in the middle of a text (FIM), for models with tokens for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvkeep.errors import UnsupportedModel
from kvkeep.models.text.codec import TextCodec

# The texts of the tokens before the prefix, the suffix and the middle, by family of models.
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<PRE>", "<SUF>", "<MID>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
_FILE_SEPARATOR = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_PADDING = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>")
_END_OF_MIDDLE = ("<EOT>", "▁<EOT>")


@dataclass(frozen=True)
class ContextFile:
    """Another file of a project, as context before the text to complete."""

    name: str
    text: str


@dataclass(frozen=True)
class FillInMiddle:
    """The tokens of a model that mark the parts of a text with a hole in it.

    end_ids: tokens beside the model's end tokens after which the middle is complete.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file_separator: int | None
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, codec: TextCodec) -> Self:
        """Find the tokens in a vocabulary. Raises UnsupportedModel if it has none."""
        ids_of = codec.tokenizer.token_to_id
        for markers in _MARKERS:
            prefix, suffix, middle = map(ids_of, markers)
            if prefix is not None and suffix is not None and middle is not None:
                break
        else:
            raise UnsupportedModel(
                "the model cannot fill in the middle of a text: expected tokens such as "
                f"{', '.join(_MARKERS[0])} in its vocabulary, found none; leave suffix out, or use "
                "a model that was trained for it, such as Qwen2.5-Coder"
            )
        repository, separator = (
            next((token for token in map(ids_of, texts) if token is not None), None)
            for texts in (_REPOSITORY, _FILE_SEPARATOR)
        )
        ends = map(ids_of, (*_PADDING, *_END_OF_MIDDLE))
        end_ids = {prefix, suffix, middle, repository, separator, *ends}
        sorted_ends = tuple(sorted(token for token in end_ids if token is not None))
        return cls(prefix, suffix, middle, repository, separator, sorted_ends)

    def prompt(
        self,
        codec: TextCodec,
        prefix_ids: Sequence[int],
        suffix: str,
        files: Sequence[ContextFile] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return a prompt after which the model writes what is between prefix and suffix.

        files: what of them fits in `max_tokens`, the end of the last ones. None for no limit.
        """
        ids = [self.prefix, *prefix_ids, self.suffix, *codec.encode(suffix), self.middle]
        opening, context = codec.opening_ids, self._context(codec, files)
        if max_tokens is not None:
            room = max(0, max_tokens - len(opening) - len(ids))
            context = context[max(0, len(context) - room) :]
        return [*opening, *context, *ids]

    def _context(self, codec: TextCodec, files: Sequence[ContextFile]) -> list[int]:
        ids: list[int] = []
        if not files:
            return ids
        if self.repository is not None:
            ids += [self.repository, *codec.encode("project\n")]
        for file in files:
            marker = [] if self.file_separator is None else [self.file_separator]
            ids += [*marker, *codec.encode(f"{file.name}\n{file.text}")]
        if self.file_separator is not None:
            ids += [self.file_separator, *codec.encode("current\n")]
        return ids
