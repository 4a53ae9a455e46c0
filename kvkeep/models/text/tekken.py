"""The words of Mistral's Tekken tokenizer, for tokenizer.json files that have those of Llama 3.

Such files were published with models as late as Mistral Small 3.1, and saved again with fine-tunes
of these. The models are trained on Tekken's words: each digit is one, and a capital inside a word
begins another.
"""

import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Sequence, Split

from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvkeep.models.spec.config_fields import read_json

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Which models it concerns, as in transformers' `fix_mistral_regex`.
_MODEL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MIN_VOCABULARY = 100_001  # older models have SentencePiece's tokens
_FIRST_CORRECT_VERSION = 5  # of transformers, which saves Tekken's words


def correct_words(tokenizer: Tokenizer, folder: Path) -> None:
    """Make a Mistral model's tokenizer split texts as Tekken does, if it has Llama 3's words.

    folder: of the model. Raises BadModelFile if its config.json is malformed.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if not isinstance(pre_tokenizer, Sequence) or tokenizer.get_vocab_size() < _MIN_VOCABULARY:
        return
    steps = json.loads(pre_tokenizer.__getstate__())["pretokenizers"]
    has_llama3_words = bool(steps) and steps[0].get("pattern") == {"Regex": _LLAMA3_WORDS}
    if has_llama3_words and _is_concerned(folder / "config.json"):
        words = Split(Regex(*PRE_TOKENIZERS["tekken"].patterns), behavior="isolated")
        others = [pre_tokenizer[index] for index in range(1, len(steps))]
        tokenizer.pre_tokenizer = Sequence([words, *others])


def _is_concerned(path: Path) -> bool:
    config = read_json(path) if path.exists() else {}
    version = re.match(r"\d+", str(config.get("transformers_version") or ""))
    is_old = version is None or int(version[0]) < _FIRST_CORRECT_VERSION
    return is_old and config.get("model_type") in _MODEL_TYPES
