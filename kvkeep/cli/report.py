"""What a run did, in numbers: the closing line, and the file that `--report` asks for."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kvkeep.storage.files.atomic import write_atomic


@dataclass(frozen=True)
class Report:
    """The fields of the JSON file. Null: not measured, or without meaning for the command.

    prompt_tokens: of prompts, evaluated in this run. reused_tokens: those that came evaluated from
    a file or the prefix cache. prefix_differs_at: the first token at which the nearest prompt in
    the prefix cache differs, where more of it could have been reused. saved_bytes: of the file to
    which the session was saved last. kv_bits, far_bits: in which cells are kept, "8", "8/4" or "4".
    settings: of the policy, such as an archive's method and ratio.
    keep, kv_cells: tokens. kv_bytes: memory that keys and values take at the end. seed: the one
    that was used. finish_reason: "length", "eos", "stop", "end" (of the text or the chat),
    "interrupt" (Ctrl-C), "closed" (the reader of standard output went away) or "error".
    """

    command: str
    model: str
    policy: str
    max_kv_size: int
    keep: int
    settings: dict[str, int | float | str]
    kv_bits: str | None
    far_bits: str | None
    seed: int | None
    prompt_tokens: int
    prefill_tokens_per_s: float | None
    generated_tokens: int
    decode_tokens_per_s: float | None
    peak_rss_bytes: int
    kv_cells: int
    kv_bytes: int
    reused_tokens: int
    prefix_differs_at: int | None
    saved_bytes: int | None
    perplexity: float | None
    finish_reason: str

    def line(self) -> str:
        parts = [
            f"prompt {self.prompt_tokens}{_at(self.prefill_tokens_per_s)}",
            *self._reused(),
            f"generated {self.generated_tokens}{_at(self.decode_tokens_per_s)}",
            f"cells {self.kv_cells} of {self.max_kv_size}, {megabytes(self.kv_bytes)}",
            f"peak RAM {megabytes(self.peak_rss_bytes)}",
            *(["interrupted"] if self.finish_reason == "interrupt" else []),
        ]
        return " | ".join(parts)

    def _reused(self) -> list[str]:
        if not self.reused_tokens and self.prefix_differs_at is None:
            return []
        where = f", first differs at token {self.prefix_differs_at}"
        reused = f"reused {counted(self.reused_tokens, 'token')}"
        return [reused + (where if self.prefix_differs_at else "")]

    def write(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        write_atomic(path, f"{text}\n".encode())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def megabytes(count: int) -> str:
    size = count / 1e6
    return f"{size:,.0f} MB" if size >= 100 else f"{size:.1f} MB"


def _at(rate: float | None) -> str:
    return f" at {rate:,.1f} tok/s" if rate is not None else " tokens"
