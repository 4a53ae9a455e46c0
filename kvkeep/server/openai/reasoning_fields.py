"""Fields of OpenAI's APIs, and of others like them, by which a request says how to reason."""

from typing import Annotated

from pydantic import Field

from kvkeep.chat.renderer import RenderOptions
from kvkeep.server.limits import MAX_TOKENS, Data, ShortText
from kvkeep.server.schemas import RequestBody

_Tokens = Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)]  # -1: no limit
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # that templates do not know


class ReasoningConfig(RequestBody):
    """Reasoning settings, as in Anthropic's API ("thinking") and OpenRouter's ("reasoning")."""

    type: ShortText | None = None  # "disabled" for no reasoning
    enabled: bool | None = None
    effort: ShortText | None = None
    budget_tokens: _Tokens = None
    max_tokens: _Tokens = None

    @property
    def is_enabled(self) -> bool | None:
        """Whether the model reasons; None for the template's default."""
        if self.enabled is not None:
            return self.enabled
        return None if self.type is None else self.type != "disabled"

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.budget_tokens is None else self.budget_tokens


class ReasoningFields(RequestBody):
    """The fields that chats and responses share.

    reasoning_effort: "none" for no reasoning. reasoning_budget: the most tokens of reasoning; -1
    for any number. enable_thinking: whether the model reasons. chat_template_kwargs: variables for
    the chat template.
    """

    reasoning_effort: ShortText | None = None
    reasoning_budget: _Tokens = None
    enable_thinking: bool | None = None
    thinking: ReasoningConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Data | None = None

    def render_options(self) -> RenderOptions:
        """Return how the template renders the conversation."""
        effort = self._effort
        return RenderOptions(
            reasoning_effort=_EFFORTS.get(effort or "", effort),
            enable_thinking=self._enable_thinking,
            template_kwargs=self.chat_template_kwargs or {},
        )

    @property
    def max_reasoning_tokens(self) -> int | None:
        """The most tokens of reasoning; None for any number."""
        if self._enable_thinking is False or self._effort == "none":
            return 0
        budgets = (self.reasoning_budget, *(config.budget for config in self._configs))
        budget = next((budget for budget in budgets if budget is not None), None)
        return None if budget == -1 else budget

    @property
    def _configs(self) -> list[ReasoningConfig]:
        return [config for config in (self.thinking, self.reasoning) if config]

    @property
    def _effort(self) -> str | None:
        efforts = (self.reasoning_effort, *(config.effort for config in self._configs))
        return next((effort for effort in efforts if effort), None)

    @property
    def _enable_thinking(self) -> bool | None:
        variables = self.chat_template_kwargs or {}
        values = (
            self.enable_thinking,
            variables.get("enable_thinking"),
            *(config.is_enabled for config in self._configs),
        )
        return next((bool(value) for value in values if value is not None), None)
