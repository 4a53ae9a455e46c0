"""Budgets in which no chat can be answered: refused at the start, with what is needed."""

from typing import TYPE_CHECKING

from kvkeep.cli.memory import KEEPING, MemoryChoice
from kvkeep.errors import InvalidArgument, UnsupportedModel

if TYPE_CHECKING:
    from kvkeep import Model


def require_room_for_a_chat(model: "Model", choice: MemoryChoice) -> None:
    """Raises InvalidArgument where a policy that ends at its budget has no room for an answer."""
    if choice.max_kv_size is None or choice.policy in KEEPING:
        return
    try:
        chat = model.text.chat([{"role": "user", "content": "Hi"}])
    except UnsupportedModel:  # there is no template: any text will do
        return
    least = len(model.text.encode(chat)) + 1
    if choice.max_kv_size < least:
        raise InvalidArgument(
            f"the shortest chat takes {least} tokens, and policy {choice.policy} ends at "
            f"--max-kv-size {choice.max_kv_size}: give {least} or more, or a policy that forgets"
        )
