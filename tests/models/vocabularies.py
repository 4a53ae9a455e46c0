"""Vocabularies trained for the tests, written to GGUF files and read back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.text.codec import TextCodec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SCRIPTS = [
    "The quick brown fox, it's WE'LL I'M he'd THEY'VE",
    "Ελληνικά γράμματα, ΚΕΦΑΛΑΊΑ",
    "русский язык и ЗАГЛАВНЫЕ буквы",
    "Հայերեն տառեր",
    "עברית עם נִקּוּד",
    "اللغة العربية مع تَشْكِيل",
    "हिन्दी में कुछ शब्द",
    "বাংলা ভাষার লেখা",
    "தமிழ் எழுத்துகள்",
    "తెలుగు అక్షరాలు",
    "ಕನ್ನಡ ಅಕ್ಷರಗಳು",
    "മലയാളം അക്ഷരങ്ങൾ",
    "ภาษาไทยไม่มีช่องว่าง",
    "ພາສາລາວ",
    "မြန်မာဘာသာ",
    "ភាសាខ្មែរ",
    "日本語のテキスト、カタカナも。",
    "中文字符，没有空格。",
    "한국어 텍스트 ㅋㅋ",
    "ქართული ანბანი",
    "አማርኛ ፊደል",
    "བོད་ཡིག",
]
TEXTS = [
    *SCRIPTS,
    "",
    " ",
    "\n",
    "  two lead and three trail   ",
    "runs    of     spaces\t\ttabs \t mixed\n\n\n\n  indented  \r\n  end",
    " " * 37 + "x" + " " * 12,
    "def f(x):\n\treturn {k: v**2 for k, v in x.items()}  # 12345 3.14159\n\n\nclass A:\n  ...",
    "#include <vector>\nint main() { return !a && b->c != 0x1F; } // $x, @y, ~z",
    "1 12 123 1234 12345678 1,000,000 2026-01-31 1e-5 ½ ² ٣٤٥ 一二三",
    "don't DON'T Don'T I'LL we've WE'VE 's 'S it'ſ o'clock",
    "camelCase HTTPServer iPhone XMLHttpRequest snake_case ÄÖÜß Łódź ǅ ʰ",
    "é e\u0301 naïve nai\u0308ve ñ, nbsp\u00a0, wide\u3000space, zero\u200bwidth, \u2028line",
    "🎉 👨‍👩‍👧‍👦 🇫🇷 👍🏽 ❤️ 1️⃣ ∑∫√ ←↑→ 𝔘𝔫𝔦",
    "a/b//c\n/d !?!\n// --- ***\n*** ...\r\n\r\n",
    "abababab aaaaa baaab aabaab",
    topics["lambda"],
]
# Of code and prose, and of all scripts, so that merges cross what splitters cut.
CORPUS = "\n".join([*list(topics.values())[:40], *SCRIPTS * 5])


def tokenizer_from_gguf(
    path: Path,
    kind: str,
    tokens: Sequence[str],
    types: Sequence[int],
    fields: Mapping[str, Any],
    architecture: str = "llama",
) -> Tokenizer:
    """Build a tokenizer from a GGUF file of these tokens. fields: keys after `tokenizer.ggml.`."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    if types:
        writer.add_token_types(list(types))
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return build_tokenizer(GgufFile.open(path))


def codec(folder: Path, tokenizer: Tokenizer) -> TextCodec:
    """Return the codec of a tokenizer that was saved and loaded."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec.open(folder)


def trained_tokens() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train tokens and merges, many of them across words, so that splits show in the ids."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=1500,
        initial_alphabet=ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    cased = [CORPUS, CORPUS.upper(), *TEXTS * 3]
    tokenizer.train_from_iterator("\n".join(cased).split("."), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
