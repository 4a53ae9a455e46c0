"""Conversations of requests are parsed in a thread: long ones would hold up other requests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from server.conftest import RunningServer
from starlette.requests import Request

from kvkeep.server.anthropic import messages as anthropic
from kvkeep.server.anthropic.request import CountTokensRequest
from kvkeep.server.openai import chat, responses
from kvkeep.server.openai.chat_request import ChatRequest
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.service import RequestContext
from kvkeep.server.sessions import reuse


class WatchedMessage(dict[str, Any]):
    """A message that records whether its content is read in an event loop's thread."""

    def __init__(self) -> None:
        super().__init__(role="user", content="Hi")
        self.in_loop = list[bool]()

    def get(self, key: str, default: Any = None) -> Any:
        if key == "content":
            self.in_loop.append(asyncio._get_running_loop() is not None)
        return super().get(key, default)


Route = Callable[[WatchedMessage, RequestContext], Coroutine[Any, Any, Any]]
# `model_construct` copies no message.
ROUTES: dict[str, Route] = {
    "chat": lambda message, context: chat.input_tokens(
        ChatRequest.model_construct(messages=[message]), context
    ),
    "responses": lambda message, context: responses.input_tokens(
        ResponsesRequest.model_construct(input=[message]), context
    ),
    "messages": lambda message, context: anthropic.count_tokens(
        CountTokensRequest.model_construct(messages=[message]), context
    ),
    "edited messages": lambda message, context: anthropic.count_tokens(
        CountTokensRequest.model_construct(
            messages=[message],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        ),
        context,
    ),
    "explain": lambda message, context: reuse.explain(
        reuse.ExplainRequest.model_construct(messages=[message]), context
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_a_conversation_is_parsed_in_a_thread(server: RunningServer, name: str) -> None:
    message = WatchedMessage()
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []})
    asyncio.run(ROUTES[name](message, RequestContext(server.service, "0", request)))
    assert message.in_loop
    assert not any(message.in_loop)
