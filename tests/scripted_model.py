"""A model that writes given answers, for tests of what servers and clients make of them.

The model is a real one, and the server is unchanged: a sampling constraint allows only the next
token of the answer. Other constraints of the request, such as a grammar, are replaced, or checked.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from kvkeep.engine import Engine, Generation, GenerationRequest
from kvkeep.engine.request import Listener, RequestLike, SessionRequest
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.sampling import Constraint, Sampling
from tests.small_models import small_spec, small_tokenizer

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

# Renders all roles, tools, calls and reasoning, whatever the form of the model's answers.
_TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %} ({{ message.reasoning_content }}){% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_OPENING = "{%- if add_generation_prompt %}<|im_start|>assistant\n"  # of an answer


class ScriptedConstraint:
    """Allows the tokens of an answer, one after another."""

    def __init__(self, ids: Sequence[int], replaced: Constraint | None, checks: bool = False):
        """replaced: the request's constraint, which may end the answer. checks: whether it must
        allow the tokens too.
        """
        self._ids, self._replaced = list(ids), replaced
        self._checked = replaced if checks else None

    @property
    def complete(self) -> bool:
        """Whether the answer ends here, such as behind the only call that it may have."""
        return bool(getattr(self._replaced, "complete", False))

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        if self._checked is not None:
            allowed = self._checked.masked(torch.zeros_like(logits))
            assert allowed[self._ids[0]] == 0.0, f"token {self._ids[0]} is not allowed"
        masked = torch.full_like(logits, -torch.inf)
        masked[self._ids[0]] = 0.0
        return masked

    def accept(self, token: int) -> None:
        assert token == self._ids.pop(0)
        if self._checked is not None:
            self._checked.accept(token)


class ScriptedEngine(Engine):
    """An engine whose generations write the answers that a function returns for their prompts.

    write: called with the text of the new part of the prompt. Texts of control tokens in its
    answers are control tokens; an end token follows them. checks_constraints: whether the
    constraints of requests must allow the answers.
    """

    def __init__(
        self,
        model: Model,
        write: Callable[[str], str],
        checks_constraints: bool = False,
        **options: Any,
    ):
        self._write, self._checks_constraints = write, checks_constraints
        super().__init__(model, **options)

    def submit(
        self,
        request: RequestLike,
        session: str | None = None,
        owner: str = "0",
        listener: Listener | None = None,
        revision: int | None = None,
    ) -> Future[list[Generation]]:
        if isinstance(request, SessionRequest):  # made at admission
            make = request.make
            scripted = replace(request, make=lambda record: self._scripted_request(make(record)))
            return super().submit(scripted, session, owner, listener, revision)
        return super().submit(self._scripted_request(request), session, owner, listener, revision)

    def submit_many(
        self,
        request: GenerationRequest,
        samplings: Sequence[Sampling],
        owner: str = "0",
        listeners: Sequence[Listener | None] | None = None,
    ) -> Future[list[Generation]]:
        scripted = [self._scripted(request, sampling) for sampling in samplings]
        return super().submit_many(request, scripted, owner, listeners)

    def _scripted_request(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, sampling=self._scripted(request, request.sampling))

    def _scripted(self, request: GenerationRequest, sampling: Sampling) -> Sampling:
        answer = self._write(self.model.text.decode(request.prompt))
        ids = self.model.text.encode(answer, special=True)
        ids.append(self.model.end_token_ids[0])
        constraint = ScriptedConstraint(ids, sampling.constraint, self._checks_constraints)
        return replace(sampling, constraint=constraint)


def family_model(
    folder: Path,
    markers: Sequence[str],
    signs: Sequence[str] = (),
    text_markers: Sequence[str] = (),
    opens_reasoning: bool = False,
) -> Model:
    """Return a small random model in a folder, whose answers are in a family's form.

    Its tokenizer has a token for each byte. markers: texts of its control tokens, beside those of
    turns. signs: texts by which the form is detected in the chat template. text_markers: markers
    that are tokens too, but of text. opens_reasoning: whether the template begins the reasoning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = small_tokenizer()
    control_texts = [TURN_END, TURN_START, *markers]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in control_texts])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in text_markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": TURN_END}))
    comment = "".join("{# " + sign + " #}" for sign in signs)
    opening = f"{_OPENING}<think>\n" if opens_reasoning else _OPENING
    (folder / "chat_template.jinja").write_text(comment + _TEMPLATE.replace(_OPENING, opening))
    return _small_model(folder, tokenizer.token_to_id(TURN_END), tokenizer.get_vocab_size(True))


@contextmanager
def slowed(model: Model) -> Iterator[None]:
    """Let a model wait in each step, so that a client can interrupt its answer."""
    forward = model.decoder.forward

    def slow_forward(*arguments: Any) -> Any:
        time.sleep(0.05)
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.decoder, "forward", slow_forward)
        yield


def model_with_text_of(
    folder: Path, source: Path, end: str = TURN_END, template: str | None = None
) -> Model:
    """Return a small random model in a folder, with tokenizer and template of the model in source.

    It takes long prompts, which it prefills in no time. end: the text of its end token. template:
    another template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if "token" in path.name or "template" in path.name:
            shutil.copy(path, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = TextCodec.open(folder).tokenizer
    return _small_model(folder, tokenizer.token_to_id(end), tokenizer.get_vocab_size(True))


def _small_model(folder: Path, end_id: int, vocab_size: int) -> Model:
    spec = replace(small_spec(200_000), vocab_size=vocab_size, eos_token_ids=(end_id,))
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.1
        for name, shape in tensor_shapes(spec).items()
    }
    return Model("small", folder, Decoder(spec, tensors), TextCodec.open(folder))
