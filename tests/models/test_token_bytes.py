"""The bytes of single tokens join to the text, for every kind of tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from tests.examples import examples
from tests.models.test_gguf_sentencepiece import LIKE_GEMMA, LIKE_LLAMA2, train
from tests.models.vocabularies import CORPUS, TEXTS

SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    train_tokenizer(tokenizer, pre_tokenizers.ByteLevel.alphabet(), [])
    tokenizer.add_special_tokens([AddedToken("<|é end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("ÜÜ", normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer as transformers converts Llama's, with a space before each text."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<0x00>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, prepend_scheme="always")]
    )
    train_tokenizer(tokenizer, [SPACE], BYTES)
    definition = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    return Tokenizer.from_str(json.dumps(definition))


def train_tokenizer(tokenizer: Tokenizer, alphabet: list[str], first: list[str]) -> None:
    trainer = BpeTrainer(
        vocab_size=1500,
        special_tokens=first,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=16,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines()[::4], trainer)


KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "byte level": lambda _: byte_level(),
    "llama 2": lambda folder: train(**LIKE_LLAMA2).from_gguf(folder / "m.gguf"),
    "gemma": lambda folder: train(**LIKE_GEMMA).from_gguf(
        folder / "m.gguf", add_space_prefix=False
    ),
    "metaspace": lambda _: metaspace(),
}


@pytest.fixture(scope="module")
def codecs(
    smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], TextCodec]:
    """Return all codecs. Not a fixture, since hypothesis prints the arguments of a test."""
    made = {"smollm2": TextCodec.open(smollm2_folder)}
    for kind, tokenizer in KINDS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer(folder).save(str(folder / "tokenizer.json"))
        made[kind] = TextCodec.open(folder)
    return made.__getitem__


@pytest.mark.parametrize("kind", ["smollm2", *KINDS])
@settings(max_examples=examples(60))
@given(text=st.text(max_size=30) | st.sampled_from(TEXTS))
def test_token_bytes_join_to_the_text(
    codecs: Callable[[str], TextCodec], kind: str, text: str
) -> None:
    codec = codecs(kind)
    ids = codec.encode(text)
    raw = b"".join(map(codec.token_bytes, ids))
    # The dummy prefix, which decoding a whole text takes away. Metaspace adds none to a space.
    if ids and (kind == "llama 2" or (kind == "metaspace" and text[0] not in (" ", SPACE))):
        assert raw[:1] == b" "
        raw = raw[1:]
    assert codec.decode_continuation(ids[1:]).endswith(codec.decode(ids[1:]))
    if kind == "smollm2":  # which has no token for some bytes
        assert raw.decode(errors="replace") == codec.decode(ids)
    else:
        assert raw == text.replace(SPACE, " " if kind != "byte level" else SPACE).encode()


def test_spaces_and_parts_of_characters_are_kept(codecs: Callable[[str], TextCodec]) -> None:
    llama, smollm2 = codecs("llama 2"), codecs("smollm2")
    the = llama.tokenizer.token_to_id("▁the")
    assert (llama.decode([the]), llama.token_bytes(the)) == ("the", b" the")
    parts = [llama.token_bytes(token) for token in llama.encode("🎉")]
    assert parts[-4:] == [b"\xf0", b"\x9f", b"\x8e", b"\x89"]
    assert b"".join(map(smollm2.token_bytes, smollm2.encode("🎉"))) == "🎉".encode()
    assert smollm2.token_bytes(2) == b"<|im_end|>"


def test_added_tokens_have_their_text_as_bytes(codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("byte level")
    ids = codec.encode("aÜÜ<|é end|>", special=True)
    assert [codec.token_bytes(token).decode() for token in ids] == ["a", "ÜÜ", "<|é end|>"]
    assert [codec.is_control(token) for token in ids] == [False, False, True]


def test_ids_beyond_the_vocabulary_have_no_bytes(codecs: Callable[[str], TextCodec]) -> None:
    codec = codecs("smollm2")
    for token in (10**6, 2**32, 2**40):
        assert codec.token_bytes(token) == b""
        assert codec.decode([token]) == ""
    with pytest.raises(InvalidArgument, match="-1"):
        codec.token_bytes(-1)
