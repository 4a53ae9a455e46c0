"""Sampling by a model's generation_config.json, and with the parameters of a request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadModelFile, InvalidArgument
from kvkeep.session.sampling import Sampling

# A window of 64 tokens, as llama.cpp's, does not see that a stanza of 65 tokens repeats.
DEFAULT_SAMPLING = Sampling(0.7, 40, 0.95, 0.05, repetition_penalty=1.1, repetition_window=256)
_RECOMMENDED_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_sampling(generation_config: Mapping[str, Any], source: object) -> Sampling:
    """Return `DEFAULT_SAMPLING` with the parameters that a model's publisher recommends.

    generation_config: of transformers. A temperature of 0 is not taken over, since greedy decoding
    repeats itself; nor is `do_sample`. A top_k of -1 stands for all tokens, as 0 does. source: what
    it was read from, for messages. Raises BadModelFile for a parameter that is out of range.
    """
    parameters = {name: generation_config.get(name) for name in _RECOMMENDED_PARAMETERS}
    parameters["temperature"] = parameters["temperature"] or None
    top_k = parameters["top_k"]
    if top_k == -1 or (isinstance(top_k, float) and top_k.is_integer()):
        parameters["top_k"] = max(0, int(top_k))
    try:
        return with_parameters(DEFAULT_SAMPLING, parameters)
    except InvalidArgument as error:
        raise BadModelFile(f"{source}: {error}") from error


def suppressed_tokens(
    generation_config: Mapping[str, Any], vocab_size: int, source: object
) -> NDArray[np.int64]:
    """Return the ids `[n]` of the tokens that are never sampled: `suppress_tokens`.

    Ids beyond the vocabulary are left out, as in transformers and llama.cpp. source: as of
    `model_sampling`. Raises BadModelFile if it is no list of whole numbers.
    """
    ids = generation_config.get("suppress_tokens")
    if ids is None:
        ids = []
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadModelFile(
            f"{source}: suppress_tokens must be a list of token ids, found {str(ids)[:80]}"
        )
    return np.array(sorted({x for x in ids if 0 <= x < vocab_size}), dtype=np.int64)


def with_parameters(defaults: Sampling, parameters: Mapping[str, Any]) -> Sampling:
    """Return the defaults with the parameters that are not None in `parameters`.

    A temperature of 0 asks for plain greedy decoding: then no default penalty applies either.
    Raises InvalidArgument for a parameter that is out of range.
    """
    changes = {name: value for name, value in parameters.items() if value is not None}
    if changes.get("temperature") == 0:
        changes = {"repetition_penalty": 1.0, **changes}
    return replace(defaults, **changes)
