"""GGUF files with random weights in the shapes of known models, to measure speed.

    python -m benchmarks.random_gguf llama-1b Q4_K_M /tmp/llama-1b.gguf

Every matrix has blocks of random bytes in the mix of formats that llama.cpp's quantiser chooses,
with scales that keep activations finite. The vocabulary is synthetic: the bytes, and merges of
pairs.
"""

from math import prod
from pathlib import Path

import click
import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm

from benchmarks.gguf_shapes import SHAPES, Shape, add_fields, matrices, vectors

KINDS = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "F16", "BF16", "MXFP4")
_SCALE_OFFSETS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_WEIGHTS_AT_ONCE = 1 << 24  # weights
_CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("path", type=click.Path(path_type=Path))
def main(shape: str, kind: str, path: Path) -> None:
    """Write a file of random weights in SHAPE, held as KIND, to PATH."""
    write(path, SHAPES[shape], kind)
    click.echo(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


def write(path: Path, shape: Shape, kind: str) -> None:
    """Write a file; it is held in memory as a whole."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    suffix = "_MOE" if kind == "MXFP4" else ""
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}{suffix}"])
    add_fields(writer, shape)
    _add_vocabulary(writer, shape.vocabulary)
    random = np.random.default_rng(0)
    drawn = tqdm(matrices(shape).items(), "drawing weights", disable=None)
    for name, (*experts, rows, columns) in drawn:
        format_name = _format(name, kind, shape.layers)
        blocks = random_blocks(random, format_name, prod(experts) * rows, columns)
        blocks = blocks.reshape(*experts, rows, -1)
        writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[format_name])
    for name, values in vectors(shape).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def _format(name: str, kind: str, layers: int) -> str:
    """Return the format that llama.cpp's quantiser gives a matrix in a file of type `kind`."""
    if "ffn_gate_inp" in name:
        return "F32"
    if kind == "MXFP4":  # of experts alone
        return "MXFP4" if "_exps" in name else "Q8_0"
    if name == "output.weight" or (name == "token_embd.weight" and kind.startswith("Q")):
        return "Q8_0" if kind == "Q8_0" else "Q6_K"
    base, _, mix = kind.partition("_K_")
    if not mix:
        return kind
    if mix == "M" and "attn_qkv" in name and base in ("Q4", "Q5"):
        return "Q5_K" if base == "Q4" else "Q6_K"
    if mix == "M" and name.startswith("blk.") and ("attn_v" in name or "ffn_down" in name):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return f"{base}_K"


def random_blocks(
    random: np.random.Generator, format_name: str, rows: int, columns: int
) -> NDArray[np.uint8]:
    """Return random blocks `[rows, bytes]`; weights have the scale of a trained matrix."""
    size = columns**-0.5
    if format_name in ("F16", "BF16", "F32"):
        values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(size)
        return np.asarray(gguf.quantize(values, GGMLQuantizationType[format_name]))
    block_size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[format_name]]
    if columns % block_size:
        raise click.UsageError(
            f"rows of {columns} are not a multiple of the block size of {format_name}; take Q8_0"
        )
    blocks = random.integers(0, 256, (rows, columns // block_size, nbytes), dtype=np.uint8)
    if format_name == "MXFP4":  # a block begins with its exponent
        blocks[..., 0] = 127 + round(np.log2(size)) - 1
        return blocks.reshape(rows, -1)
    largest = {"Q8_0": 127, "Q6_K": 32 * 127}.get(format_name, 8 if block_size == 32 else 8 * 32)
    for offset in _SCALE_OFFSETS.get(format_name, (0,)):
        scale = np.array([size / largest], dtype=np.float16)
        blocks[..., offset : offset + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of the 256 bytes, merges of earlier tokens, and two control tokens."""
    tokens, merges = sorted(ByteLevel.alphabet()), list[str]()
    known = set(tokens)
    for index in range(count):  # pairs in diagonal order
        if len(tokens) == count - 2:
            break
        for left in range(index + 1):
            merged = tokens[left] + tokens[index - left]
            if merged in known or len(tokens) == count - 2:
                continue
            merges.append(f"{tokens[left]} {tokens[index - left]}")
            tokens.append(merged)
            known.add(merged)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*tokens, "<|begin|>", "<|end|>"])
    writer.add_token_types([1] * len(tokens) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(count - 2)
    writer.add_eos_token_id(count - 1)
    writer.add_chat_template(_CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
