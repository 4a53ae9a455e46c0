"""Messages in the form in which chat templates take them."""

import hashlib
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.call_form import CallText
from kvkeep.chat.inserted_texts import call_mark
from kvkeep.chat.messages import (
    Message,
    Tool,
    ToolCall,
    ToolResult,
    call_places,
    content_text,
)
from kvkeep.chat.output import arguments_text
from kvkeep.chat.template_traits import (
    TemplateTraits,
    metadata_call,
    reasoning_part_list,
    text_part_list,
)
from kvkeep.chat.tool_schemas import tools_text
from kvkeep.models.text.codec import TextCodec

ID_CHARACTERS = string.ascii_letters + string.digits
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class TemplateEntries:
    """The conversion of messages into entries of a template with these traits.

    call_text: the form of calls in texts, for a template that takes tools and results, but no
    calls; None if the model has none.
    """

    codec: TextCodec
    traits: TemplateTraits
    call_text: CallText | None = None

    @property
    def text_form(self) -> CallText | None:
        """The form in which calls stand in the texts of messages; None if the template has one."""
        form, traits = self.call_text, self.traits
        if form is None or traits.calls or not traits.tools:
            return None
        return form if form.result_role in traits.result_roles else None

    def of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the entries of messages, of which each result has its own."""
        calls, entries = call_places(messages), list[dict[str, Any]]()
        for number, message in enumerate(messages):
            places = (calls.get((number, index)) for index in range(len(message.results)))
            of_calls = [messages[place[0]].calls[place[1]] if place else None for place in places]
            results = list(zip(message.results, of_calls, strict=True))
            in_call = self.traits.results_in_call and entries and "tool_calls" in entries[-1]
            if results and in_call:
                entries[-1]["tool_responses"] = [self._response(*pair) for pair in results]
            else:
                entries += [self._result_entry(*pair) for pair in results]
            if message.role != "tool":
                entries += self._message_entries(message, number)
        return entries

    def with_tools(
        self, entries: list[dict[str, Any]], tools: Sequence[Tool]
    ) -> list[dict[str, Any]]:
        """Return entries with tools in the system message, if the template takes them there."""
        if not (tools and self.traits.tools and self.traits.system_tools):
            return entries
        system: dict[str, Any] = {"role": "system", "content": self.content("")}
        if entries[0]["role"] == "system":
            system, *entries = entries
        return [{**system, self.traits.system_tools: tools_text(tools)}, *entries]

    def inserted_texts(self, messages: Sequence[Message]) -> dict[int, str]:
        """Return the texts that `of` leaves out: see `insert_texts`. By number of message."""
        if self.text_form is not None or self.traits.text_with_calls != "inserted":
            return {}
        texts = {number: message.text for number, message in enumerate(messages) if message.calls}
        return {number: text for number, text in texts.items() if text}

    def content(self, text: str) -> Any:
        """Return a text as the content of an entry."""
        return text_part_list(text) if self.traits.text_parts else text

    def with_content(self, message: Message, text: str) -> dict[str, Any]:
        """Return the entry of a message without calls, with its reasoning and another text."""
        if not message.reasoning:
            return {"role": message.role, "content": self.content(text)}
        if self.traits.reasoning == "part":
            parts = reasoning_part_list(message.reasoning, text)
            return {"role": message.role, "content": parts}
        content, reasoning = self.content(text), message.reasoning
        return {"role": message.role, "content": content, "reasoning_content": reasoning}

    def _message_entries(self, message: Message, number: int) -> list[dict[str, Any]]:
        entry = self.with_content(message, message.text)
        if not message.calls:
            return [entry]
        if (form := self.text_form) is not None:
            return [self.with_content(message, self._text_with_calls(message, form))]
        if self.traits.metadata_calls:
            said = [entry] if message.text or message.reasoning else []
            return [*said, *(metadata_call(c.name, arguments_text(c)) for c in message.calls)]
        calls = [self._call_entry(call) for call in message.calls]
        place = self.traits.text_with_calls
        if place == "plan":
            plan = "\n\n".join(filter(None, (message.reasoning, message.text)))
            return [{**entry, "tool_calls": calls, **({"tool_plan": plan} if plan else {})}]
        if not message.text or place in ("inside", "dropped"):
            return [{**entry, "tool_calls": calls}]
        call_entry = {**self.with_content(message, ""), "tool_calls": calls}
        if place == "inserted":
            calls[0]["function"]["name"] = call_mark(number) + message.calls[0].name
            return [call_entry]
        return [{"role": message.role, "content": self.content(message.text)}, call_entry]

    def _text_with_calls(self, message: Message, form: CallText) -> str:
        """Return a message's text and its calls, with control tokens around these by their names.

        What the message says cannot have these secret names.
        """
        start, end = (self.codec.template_text(marker).sealed for marker in (form.start, form.end))
        return f"{message.text}{start}{form.write(message.calls)}{end}"

    def _result_entry(self, result: ToolResult, call: ToolCall | None) -> dict[str, Any]:
        name = {"name": call.name} if call else {}
        content = self.content(content_text(result.content))
        call_id = self._template_id(result.call_id)
        role = "observation" if self.traits.metadata_calls else "tool"
        if (form := self.text_form) is not None:
            role = form.result_role
        return {"role": role, "content": content, "tool_call_id": call_id, **name}

    def _response(self, result: ToolResult, call: ToolCall | None) -> dict[str, Any]:
        name = {"name": call.name} if call else {}
        return {**name, "response": content_text(result.content)}

    def _call_entry(self, call: ToolCall) -> dict[str, Any]:
        as_text = self.traits.arguments == "text"
        arguments = arguments_text(call) if as_text else dict(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._template_id(call.id), "type": "function", "function": function}

    def _template_id(self, call_id: str) -> str:
        """Return a call's id in the form that the template takes; the same for the same id."""
        if not self.traits.short_ids or _SHORT_ID.fullmatch(call_id):
            return call_id
        number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
        characters = []
        for _ in range(9):
            number, index = divmod(number, len(ID_CHARACTERS))
            characters.append(ID_CHARACTERS[index])
        return "".join(characters)
