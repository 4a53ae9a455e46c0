"""Tokenizers whose settings users change after kvkeep has used them."""

import copy
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from kvkeep.integrations.transformers import from_transformers

QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("change", "rendered"),
    [
        (lambda t: setattr(t, "chat_template", "B {{ messages[0].content }}"), "B Hi"),
        (lambda t: setattr(t, "bos_token", "<unk>"), "A <unk> Hi"),
        (lambda t: t.add_tokens(["<more>"]), "A <s> Hi"),
        (lambda t: setattr(t, "add_bos_token", not t.add_bos_token), "A <s> Hi"),
    ],
    ids=["chat template", "bos token", "added token", "bos added or not"],
)
def test_a_changed_tokenizer_gives_a_new_codec(
    model: PreTrainedModel, tokenizer, change: Callable, rendered: str
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = "A {{ bos_token }} {{ messages[0].content }}"
    before, same = (from_transformers(model, tokenizer).text for _ in range(2))
    assert same is before
    change(tokenizer)
    after = from_transformers(model, tokenizer).text
    assert after.chat(QUESTION) == rendered
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == rendered
    assert after.opening_ids == tokenizer.encode("")
    assert before.chat(QUESTION) == "A <s> Hi"  # the files of a codec in use are still there
