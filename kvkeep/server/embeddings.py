"""Embeddings: `/v1/embeddings`, llama.cpp's `/embedding`, Ollama's `/api/embed`."""

import base64
import time
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.body_route import body_router
from kvkeep.server.ignored_fields import FieldRules
from kvkeep.server.limits import MAX_INPUTS, LongText, TokenIds
from kvkeep.server.overflow import overflow_error
from kvkeep.server.schemas import RequestBody
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.session.embedding import normalized
from kvkeep.session.token_diff import common_length

router = body_router()
_FOREIGN_IDS = (
    "input: the token ids seem to be of another tokenizer than this model's: send texts "
    "(LangChain: check_embedding_ctx_length=False)"
)
_RULES = FieldRules(harmless=("keep_alive", "options", "priority"))
_Text = LongText | TokenIds
_Inputs = _Text | Annotated[list[_Text], Field(max_length=MAX_INPUTS)]
_Dimensions = Annotated[int | None, Field(ge=1, le=1_000_000)]


class EmbeddingsRequest(RequestBody):
    """A request. input: a text, token ids, or a list of them. dimensions: the first ones only."""

    input: _Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Dimensions = None


class LlamaEmbeddingRequest(RequestBody):
    """A request of llama.cpp's. embd_normalize: p of the norm; -1 for none, 0 for int16 range."""

    content: _Inputs | None = None
    input: _Inputs | None = None
    embd_normalize: Annotated[int | None, Field(ge=-1, le=100)] = None


class OllamaEmbedRequest(RequestBody):
    """A request of Ollama's. truncate: shorten texts that are too long; false to refuse them."""

    input: _Inputs = ""
    truncate: bool | None = None
    dimensions: _Dimensions = None


class OllamaEmbeddingsRequest(RequestBody):
    prompt: LongText = ""


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsRequest, context: ContextDep) -> dict[str, Any]:
    """Return the vectors of texts."""
    _RULES.check(body, context.notices)
    embedded = await _embed(context, body.input)
    vectors = [_shortened(vector, body.dimensions) for vector in embedded.vectors]
    encode = _base64 if body.encoding_format == "base64" else Tensor.tolist
    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    return {"object": "list", "data": data, "model": context.service.model_name, "usage": usage}


@router.post("/embedding")
@router.post("/embeddings", include_in_schema=False)
async def llamacpp_embedding(
    body: LlamaEmbeddingRequest, context: ContextDep
) -> list[dict[str, Any]]:
    """Return the vectors of texts, in llama.cpp's form."""
    _RULES.check(body, context.notices)
    inputs = body.input if body.content is None else body.content
    if inputs is None:
        raise InvalidArgument("content: expected a text, token ids, or a list of them; found none")
    embedded = await _embed(context, inputs)
    vectors = [_scaled(vector, body.embd_normalize) for vector in embedded.vectors]
    return [{"index": index, "embedding": [v.tolist()]} for index, v in enumerate(vectors)]


@router.post("/api/embed")
async def ollama_embed(body: OllamaEmbedRequest, context: ContextDep) -> dict[str, Any]:
    """Return the vectors of texts, in Ollama's form: each of length 1."""
    _RULES.check(body, context.notices)
    start, embedded = time.perf_counter_ns(), _Embedded([], 0)
    if body.input:
        embedded = await _embed(context, body.input, truncate=body.truncate is not False)
    vectors = [normalized(_shortened(v, body.dimensions)) for v in embedded.vectors]
    return {
        "model": context.service.model_name,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": time.perf_counter_ns() - start,
        "load_duration": 0,
        "prompt_eval_count": embedded.num_tokens,
    }


@router.post("/api/embeddings")
async def ollama_embeddings(body: OllamaEmbeddingsRequest, context: ContextDep) -> dict[str, Any]:
    """Return the vector of one text: an older route of Ollama's."""
    _RULES.check(body, context.notices)
    if not body.prompt:
        return {"embedding": []}
    embedded = await _embed(context, body.prompt, truncate=True)
    return {"embedding": embedded.vectors[0].tolist()}


@dataclass(frozen=True)
class _Embedded:
    """The vectors of a request's texts, each `[hidden_size]`, and the tokens of all texts."""

    vectors: Sequence[Tensor]
    num_tokens: int


async def _embed(context: RequestContext, inputs: _Inputs, truncate: bool = False) -> _Embedded:
    """Compute the vectors of texts, one after the other, so that other requests run in between.

    A disconnect ends this. truncate: shorten texts that do not fit. Raises llama.cpp's error for
    them otherwise.
    """
    service = context.service
    service.model.pooling  # noqa: B018 (raises UnsupportedModel before anything is computed)
    is_single = isinstance(inputs, str) or bool(inputs and isinstance(inputs[0], int))
    texts: Sequence[Any] = [inputs] if is_single else inputs
    limit, spec = min(service.context_size, service.model.spec.max_positions), service.model.spec
    encoded = await to_thread(_encode_all, texts, context.tokenizer, spec.vocab_size)
    if await to_thread(_have_foreign_ids, texts, context.tokenizer):
        context.notices.warn(_FOREIGN_IDS)
    longest = max(map(len, encoded))
    if longest > limit and not truncate:
        raise overflow_error(service, longest)
    closing = context.tokenizer.closing_ids
    encoded = [
        ids if len(ids) <= limit else ids[: limit - len(closing)] + closing for ids in encoded
    ]
    admit, embed = service.admission_queue.admit, context.engine.embed

    async def embed_all() -> list[Tensor]:
        submissions = [partial(embed, ids) for ids in encoded]
        return [await admit(context.owner, submit, is_long=True) for submit in submissions]

    return _Embedded(await context.while_connected(embed_all()), sum(map(len, encoded)))


def _encode_all(texts: Sequence[_Text], tokenizer: TextCodec, vocab_size: int) -> list[list[int]]:
    """Encode texts with the tokens that open and close one; check token ids."""
    opening, closing = tokenizer.opening_ids, tokenizer.closing_ids
    if not texts or not all(texts):
        raise InvalidArgument("input: expected texts that are not empty; found an empty one")
    return [
        [*opening, *tokenizer.encode(text), *closing]
        if isinstance(text, str)
        else validation.token_ids("input", text, vocab_size)
        for text in texts
    ]


def _have_foreign_ids(texts: Sequence[_Text], tokenizer: TextCodec) -> bool:
    """Whether token ids seem to be of another tokenizer: their text has mostly other ones here.

    Ids where a text was cut may differ without that.
    """
    for text in texts:
        if isinstance(text, str):
            continue
        ids = [token for token in text if not tokenizer.is_control(token)]
        own_ids = tokenizer.encode(tokenizer.decode(ids))
        same = common_length(ids, own_ids) + common_length(ids[::-1], own_ids[::-1])
        if 2 * same < len(ids):
            return True
    return False


def _shortened(vector: Tensor, dimensions: int | None) -> Tensor:
    """Return the first dimensions, of length 1 (Matryoshka embeddings); None for all."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise InvalidArgument(f"dimensions must be 1 to {len(vector)}; found {dimensions}")
    return normalized(vector[:dimensions])


def _scaled(vector: Tensor, norm: int | None) -> Tensor:
    """Scale a vector as llama.cpp's `embd_normalize` says; None for as the model does."""
    if norm is None or norm < 0:
        return vector
    scale = vector.abs().max() / 32760 if norm == 0 else vector.norm(norm)
    return vector / scale if scale > 0 else vector


def _base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
