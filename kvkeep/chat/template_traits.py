"""The abilities of a model's chat template, and the form of fields that it takes."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class TemplateTraits:
    """The abilities of a chat template, and the form of fields that it takes.

    tools: descriptions of tools. calls: calls and their results, as messages of role "tool".
    result_roles: the roles by which it writes results, without calls at least.
    calls_without_tools: also in a request that has no tools. parallel_calls: several calls in one
    message, and their results. lone_results: results of calls that are not in the conversation.
    user_after_result: a user's message right behind results.
    text_with_calls: the text of a message with calls, in it, in their plan, which has the reasoning
    too, in a message of its own before it, or inserted into what the template writes.
    call_opening: what is written before a call's name, sealed, if texts are inserted before that.
    reasoning: that of the last message, in a field of its own or a part of the content.
    """

    system: bool = True  # a system message at the start
    system_midway: bool = True  # and later
    system_alone: bool = True  # and nothing else
    assistant_first: bool = True  # a conversation that the assistant begins
    empty_answer: bool = True  # an assistant's message without content
    tools: bool = False
    calls: bool = False
    result_roles: tuple[str, ...] = ()
    calls_without_tools: bool = False
    parallel_calls: bool = False
    lone_results: bool = False
    user_after_result: bool = False
    text_with_calls: Literal["inside", "plan", "before", "inserted", "dropped"] = "inside"
    call_opening: str = ""
    reasoning: Literal["field", "part", "dropped"] = "dropped"
    arguments: Literal["mapping", "text"] = "mapping"  # of calls
    results_in_call: bool = False  # results are in the field "tool_responses" of their calls
    metadata_calls: bool = False  # calls are messages of their own, as `metadata_call` returns
    short_ids: bool = False  # ids of calls must have nine letters and digits
    text_parts: bool = False  # contents must be lists of parts
    empty_tools: bool = False  # without tools, it must get an empty list of them
    system_tools: str = ""  # tools are JSON text in this field of the system message
    full_schemas: bool = False  # schemas must state all that they may leave out

    def with_calls_in_text(self) -> "TemplateTraits":
        """Return the traits for a conversation whose calls stand in the text of messages."""
        return replace(
            self,
            calls=True,
            calls_without_tools=True,
            parallel_calls=True,
            lone_results=True,
            user_after_result=True,
        )


def reasoning_part_list(reasoning: str, text: str) -> list[dict[str, str]]:
    """Return reasoning and a text, which may be empty, as the list of parts that Mistral's take."""
    return [{"type": "thinking", "thinking": reasoning}, *(text_part_list(text) if text else ())]


def metadata_call(name: str, arguments: str) -> dict[str, str]:
    """Return a call as a message of its own, whose results have the role "observation"."""
    return {"role": "assistant", "metadata": name, "content": arguments}


def text_part_list(text: str) -> list[dict[str, str]]:
    """Return a text as the list of parts that templates of multimodal models take."""
    return [{"type": "text", "text": text}]
