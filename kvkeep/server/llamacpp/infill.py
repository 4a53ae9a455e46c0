"""`/infill`: llama.cpp's endpoint for editors, which fills in what is between two texts."""

from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.fill_in_middle import ContextFile, FillInMiddle
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import MAX_FIELDS, LongText, ShortText
from kvkeep.server.llamacpp.completion import LlamaCompletionRequest, complete
from kvkeep.server.schemas import RequestBody
from kvkeep.server.service import ContextDep
from kvkeep.server.sse import JSON_OR_EVENTS

router = body_router()
_ROOM_FOR_ANSWER = 256  # tokens left for an answer of any length


class ExtraFile(RequestBody):
    """A file beside the one that is filled in."""

    filename: ShortText = "tmp"
    text: LongText


class InfillRequest(LlamaCompletionRequest):
    """A request.

    input_prefix, input_suffix: the texts before and after the one to generate. prompt: follows the
    prefix. input_extra: other files, of which as much as fits is put before them, the last first.
    """

    prompt: LongText = ""
    input_prefix: LongText
    input_suffix: LongText
    input_extra: Annotated[tuple[ExtraFile, ...], Field(max_length=MAX_FIELDS)] = ()

    def encode_prompts(self, tokenizer: TextCodec, context_size: int) -> list[list[int]]:
        """Raises UnsupportedModel for a model that cannot fill in."""
        fim = FillInMiddle.of(tokenizer)
        before = [*tokenizer.encode(self.input_prefix), *tokenizer.encode(self.prompt)]
        files = [ContextFile(file.filename, file.text) for file in self.input_extra]
        answer_tokens = _ROOM_FOR_ANSWER if self.n_predict < 0 else self.n_predict
        room = max(0, context_size - answer_tokens)
        return [fim.prompt(tokenizer, before, self.input_suffix, files, room)]

    def end_tokens(self, tokenizer: TextCodec) -> tuple[int, ...]:
        return FillInMiddle.of(tokenizer).end_ids


@router.post("/infill", response_model=None, responses=JSON_OR_EVENTS)
async def infill(
    body: InfillRequest, context: ContextDep
) -> Response | dict[str, Any] | list[dict[str, Any]]:
    """Generate the text between a prefix and a suffix."""
    return await complete(body, context)
