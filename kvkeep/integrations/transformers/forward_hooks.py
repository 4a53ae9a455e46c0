"""Hooks before and after a model's layers that turn a forward with a KvkeepCache into steps."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from kvkeep.errors import InvalidArgument, UnsupportedModel
from kvkeep.integrations.transformers.cache_forward import CacheForward, SessionBatch
from kvkeep.integrations.transformers.step_cache import StepCache

_ALLOWED_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "past_key_values"),
    *("use_cache", "cache_position", "return_dict", "logits_to_keep"),  # change no hidden state
    # Arguments of `generate` by which it chooses tokens, and which it passes on to every forward.
    *("tokenizer", "assistant_tokenizer", "assistant_model", "streamer", "synced_gpus"),
}


def hook_forward(body: nn.Module) -> list[RemovableHandle]:
    """Let forwards with a KvkeepCache append to its sessions. body: the layers below the head."""
    begin = partial(_begin_forward, inspect.signature(body.forward))
    return [
        body.register_forward_pre_hook(begin, with_kwargs=True),
        body.register_forward_hook(_end_forward, with_kwargs=True, always_call=True),
    ]


def _begin_forward(
    signature: inspect.Signature, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Evaluate the tokens of all steps but the last; return arguments to forward the last ones."""
    arguments: dict[str, Any] = dict(kwargs)
    if args:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
    batch: object = arguments.get("past_key_values")
    if not isinstance(batch, SessionBatch):
        return None
    executor = batch.executor
    if executor.body is not module:
        raise InvalidArgument("this cache belongs to another model")
    executor.require_not_moved()
    _check_gradients(executor.model, arguments)
    _check_arguments(arguments, executor.configs[0])
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    batch.resize(len(ids))
    _check_positions(batch, ids, mask, arguments.get("position_ids"))
    forward = CacheForward(batch, ids, mask)
    return (), {
        "input_ids": forward.tokens,
        "past_key_values": forward.step_cache,
        "use_cache": True,
        "return_dict": True,
    }


def _end_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Commit the tokens of a forward, or roll back if it failed (`output` is None)."""
    step_cache = kwargs.get("past_key_values")
    if not isinstance(step_cache, StepCache) or step_cache.cache_forward is None:
        return None
    forward: CacheForward = step_cache.cache_forward
    step_cache.cache_forward = None
    if forward.is_finished:
        raise InvalidArgument("a KvkeepCache was used inside its own forward")
    if output is None:
        forward.rollback()
        return None
    output["last_hidden_state"] = forward.commit(output.last_hidden_state)
    output["past_key_values"] = forward.batch
    return output


def _check_gradients(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise InvalidArgument if the forward's result would need a gradient."""
    if not torch.is_grad_enabled():
        return
    inputs = (value for value in arguments.values() if isinstance(value, Tensor))
    if any(tensor.requires_grad for tensor in (*model.parameters(), *inputs)):
        raise InvalidArgument(
            "a forward with a KvkeepCache has no gradients, and gradients are enabled: call the "
            "model under torch.no_grad() or torch.inference_mode(), or train without a KvkeepCache"
        )


def _check_arguments(arguments: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise InvalidArgument or UnsupportedModel for arguments that a KvkeepCache can't handle."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        raise InvalidArgument(
            "a forward with a KvkeepCache needs input_ids, [batch, n] with n at least 1: input "
            "without token ids (inputs_embeds, images) cannot be listed, edited or saved"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        raise InvalidArgument(
            "attention_mask must be [batch, tokens], 1 for tokens and 0 for padding; masks of "
            "other shapes work only with the model's own attention"
        )
    if arguments.get("return_dict") is False:
        raise InvalidArgument("return_dict=False is not supported with a KvkeepCache")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UnsupportedModel(
                f"the model's config sets {name}, which a forward with a KvkeepCache does not "
                "return: set it to False"
            )
    unsupported = [
        name
        for name, value in arguments.items()
        if name not in _ALLOWED_ARGUMENTS
        and value is not None
        and value is not False
        and not (name.endswith("token_type_ids") and _has_text_only(value))
    ]
    if unsupported:
        raise UnsupportedModel(
            f"a forward with a KvkeepCache does not support {', '.join(sorted(unsupported))}: "
            "kvkeep computes the attention, and the input is text"
        )


def _has_text_only(token_types: object) -> bool:
    """Whether the types of all tokens are 0: the others are for images and audio."""
    return isinstance(token_types, Tensor) and not token_types.any()


def _check_positions(
    batch: SessionBatch, ids: Tensor, mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Raise InvalidArgument for position ids that differ from the positions in the cache.

    They may count padding or not: a row of 2 columns of padding and 3 tokens may have positions
    0 to 2 or 2 to 4. Distances are the same.
    """
    if position_ids is None:
        return
    # Three dimensions: one for each axis of an image, all equal for text.
    position_ids = position_ids[0] if position_ids.dim() == 3 else position_ids
    n, past_columns = ids.shape[1], batch.get_seq_length()
    position_ids = position_ids[:, -n:].expand(len(ids), -1)
    for row, all_positions in enumerate(position_ids):
        is_token = None if mask is None else mask[row, -n:].bool()
        positions = all_positions if is_token is None else all_positions[is_token]
        if not len(positions):
            continue
        last_token_index = past_columns - batch.padding[row] + len(positions) - 1
        last_column = past_columns + (n - 1 if is_token is None else int(is_token.nonzero()[-1]))
        last = int(positions[-1])
        if last not in (last_token_index, last_column) or bool((positions.diff() != 1).any()):
            raise InvalidArgument(
                f"position_ids put token {last_token_index} of row {row} at position {last}: a "
                "KvkeepCache counts positions one by one from the first token, with or without "
                "padding, and generate must be called with use_cache=True"
            )
