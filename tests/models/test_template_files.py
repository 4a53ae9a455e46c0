"""The chat templates of a model, in each of the files that may hold them."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny_gguf import tiny_llama, write_gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.template_files import TemplateFiles
from kvkeep.models.weights.export import export

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write files into a folder: texts as they are, others as the chat_template of a JSON file."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if name.endswith(".jinja") else json.dumps({"chat_template": content})
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
        {"tokenizer_config.json": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
        {"tokenizer_config.json": {"default": "plain", "tool_use": "tools", "rag": "no"}},
        {
            "tokenizer_config.json": [
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "tools"},
            ]
        },
        {"chat_template.json": {"default": "plain", "tool_use": "tools"}},
        {
            "chat_template.jinja": "plain",
            "additional_chat_templates/tool_use.jinja": "tools",
            "tokenizer_config.json": {"default": "no", "tool_use": "no"},
            "chat_template.json": "no",
        },
    ],
)
def test_template_for_tools_is_read_wherever_it_is(tmp_path: Path, files: dict[str, Any]) -> None:
    write(tmp_path, files)
    assert TemplateFiles.read(tmp_path).source() == "plain"
    assert TemplateFiles.read(tmp_path).source(with_tools=True) == "tools"


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": "plain"},
        {"tokenizer_config.json": "plain", "chat_template.json": "no"},
        {"chat_template.jinja": "plain", "tokenizer_config.json": {"tool_use": "no"}},
        {"tokenizer_config.json": {"default": "plain"}},
        {"chat_template.jinja": "plain", "additional_chat_templates/rag.jinja": "no"},
    ],
)
def test_single_template_is_used_with_and_without_tools(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    template_files = TemplateFiles.read(write(tmp_path, files))
    assert template_files.source() == template_files.source(with_tools=True) == "plain"


def test_templates_saved_by_transformers_are_read(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])),
        chat_template={"default": "plain {{ tools }}", "tool_use": "tools {{ tools | length }}"},
    )
    tokenizer.save_pretrained(tmp_path)
    codec = TextCodec.open(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    for tools in (None, [TOOL]):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert codec.chat(messages, tools=tools) == expected


def test_errors_of_templates_do_not_tell_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnsupportedModel, match="no chat template") as missing:
        TemplateFiles.read(tmp_path / "folder").source()
    write(tmp_path / "folder", {"additional_chat_templates/tool_use.jinja": ""})
    path = tmp_path / "folder" / "additional_chat_templates" / "tool_use.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadModelFile, match=r"tool_use\.jinja cannot be read") as damaged:
        TemplateFiles.read(tmp_path / "folder").source()
    path.unlink()
    path.mkdir()
    with pytest.raises(BadModelFile, match=r"tool_use\.jinja cannot be read") as wrong_kind:
        TemplateFiles.read(tmp_path / "folder").source()
    for error in (missing, damaged, wrong_kind):
        assert str(tmp_path) not in str(error.value)


def test_gguf_conversion_and_export_keep_named_templates(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(
            [
                {"name": "default", "template": "plain"},
                {"name": "tool_use", "template": "tools"},
            ]
        )
        writer.add_string("tokenizer.chat_template.../escape", "no")

    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit)
    convert(path, tmp_path / "converted", False)
    export(tmp_path / "converted", tmp_path / "exported", torch.float32)
    for folder in (tmp_path / "converted", tmp_path / "exported"):
        assert TemplateFiles.read(folder).source() == "plain"
        assert TemplateFiles.read(folder).source(with_tools=True) == "tools"
        assert len(list(folder.rglob("*.jinja"))) == 2
