"""Pre-tokenizers of byte-level BPE by their GGUF names: how a text is split into words.

Names and patterns are those of llama.cpp and of the families' own tokenizer.json. Where the two
differ, as in Unicode composition (NFC), the family's own is used.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split


@dataclass(frozen=True)
class PreTokenizerSpec:
    """A pre-tokenizer, and tokenizer settings that differ with it.

    patterns: applied in turn, each to the pieces of the previous one. Matches and the text between
        them become pieces; those of the last pattern are the words.
    ignore_merges: encode a word that is a token as that token, even if no merges lead to it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False  # normalise text by NFC first
    add_bos: bool = False  # unless the file says otherwise

    def build(self) -> PreTokenizer:
        """Return the splits, and then the mapping of bytes to GPT-2's byte alphabet."""
        splits = map(_build_split, self.patterns)
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _build_split(pattern: str) -> PreTokenizer:
    # tokenizer.json has a class of its own for single digits, with a newer version of Unicode.
    if pattern == _DIGIT:
        return Digits(individual_digits=True)
    return Split(Regex(pattern), behavior="isolated")


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # as in "it's" and "I'LL"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4_words(digits: str, letters: str = r"\p{L}", spaces: str = _SPACES) -> str:
    """Return the pattern of GPT-4, as in Llama 3. letters: what a class of letters contains."""
    other = rf"[^\s{letters}\p{{N}}]"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?{other}+[\r\n]*|{spaces}"
    )


def _gpt4o_words(
    digits: str,
    contractions: str = rf"{_CONTRACTIONS}?",
    class_suffix: str = "",
    closing: str = r"\r\n/",
) -> str:
    """Return the pattern of GPT-4o, in which upper-case letters only begin a word.

    class_suffix: excludes letters from the letter classes. closing: characters that attach to the
    punctuation before them.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{class_suffix}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{class_suffix}]"
    leading = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{leading}{upper}*{lower}+{contractions}|{leading}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{closing}]*|{_SPACES}"
    )


# DeepSeek 3: ASCII punctuation attaches to the letters after it, and marks count as letters.
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_KIMI = r"[\p{Han}]+|" + _gpt4o_words(_THREE_DIGITS, class_suffix=r"&&[^\p{Han}]", closing=r"\r\n")
_TINY_AYA = r"\d{1,3}(?=(?:\d{3})*\b)"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Runs of spaces, in powers of two.
_JAIS2_SPACES = (
    r"\s*[\r\n]+|"
    + "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))
    + r"|\s{1,2}(?!\S)|\s{1}"
)

# llama.cpp's default: numbers in threes from their first digit, punctuation apart.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)
_GPT4, _GPT4O = _gpt4_words(_THREE_DIGITS), _gpt4o_words(_THREE_DIGITS)

# Each pre-tokenizer by all names that files have for it.
_BY_NAMES = {
    "default": PreTokenizerSpec(_DEFAULT),
    "gpt-2 phi-2 exaone4 gigachat a.x-4.0 mellum trillion granite-docling": PreTokenizerSpec(
        (_GPT2,)
    ),
    "olmo": PreTokenizerSpec((_GPT2,), nfc=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizerSpec(
        (_DIGIT, _GPT2)
    ),
    "command-r": PreTokenizerSpec((_DIGIT, _GPT2), nfc=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0": PreTokenizerSpec(
        (_GPT4,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizerSpec((_GPT4,)),
    "glm4 glm5": PreTokenizerSpec((_GPT4,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen stablelm2": PreTokenizerSpec((_gpt4_words(_DIGIT),), nfc=True),
    "hunyuan solar-open grok-2 kormo megrez": PreTokenizerSpec((_gpt4_words(_DIGIT),)),
    "qwen35": PreTokenizerSpec((_gpt4_words(_DIGIT, r"\p{L}\p{M}"),), nfc=True),
    "laguna": PreTokenizerSpec((r"[^\n]+|[\n]+", _gpt4_words(_DIGIT))),
    "minicpm5": PreTokenizerSpec((_THREE_DIGITS, _gpt4_words(r"\p{N}+")), ignore_merges=True),
    "jais-2": PreTokenizerSpec((_gpt4_words(_THREE_DIGITS, spaces=_JAIS2_SPACES),)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizerSpec((_GPT4O,)),
    "tekken": PreTokenizerSpec(
        (_gpt4o_words(_DIGIT, contractions=""),), ignore_merges=True, add_bos=True
    ),
    "tiny_aya cohere2moe": PreTokenizerSpec((_TINY_AYA, _GPT4O)),
    "kimi-k2": PreTokenizerSpec((_KIMI,)),
    "youtu": PreTokenizerSpec((_YOUTU, _gpt4o_words(_DIGIT)), ignore_merges=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizerSpec(
        (_THREE_DIGITS, _CHINESE_AND_KANA, _DEEPSEEK3_WORDS)
    ),
    "deepseek-coder": PreTokenizerSpec(_DEEPSEEK_CODER),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizerSpec((_BAILING,)),
    "seed-coder": PreTokenizerSpec((_SEED_CODER,)),
    "exaone-moe": PreTokenizerSpec((_EXAONE_MOE,)),
}
PRE_TOKENIZERS = {name: entry for names, entry in _BY_NAMES.items() for name in names.split()}
