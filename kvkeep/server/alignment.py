"""Request fields for exact reuse or alignment in place, and its report in responses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from kvkeep.engine import Usage
from kvkeep.server.limits import MAX_TOKENS
from kvkeep.server.schemas import RequestBody, StrictBody
from kvkeep.server.service import RequestContext
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.types import AlignmentMode

_Count = Annotated[int | None, Field(ge=0, le=MAX_TOKENS)]


class AlignmentParams(StrictBody):
    """The field `alignment` in full. Counts that are missing are the server's."""

    mode: AlignmentMode
    min_saved: _Count = None
    reread: _Count = None
    reread_share: Annotated[float | None, Field(ge=0, le=1)] = None


class AlignmentFields(RequestBody):
    """kvkeep's own field of requests with a prompt, for the reuse of similar prompts.

    alignment: "exact" or "in_place", or an object; by default that of the API key or the server.
    """

    alignment: AlignmentMode | AlignmentParams | None = None

    def alignment_options(self, context: RequestContext) -> AlignmentOptions:
        """Return the options of the request's prompt."""
        default, alignment = context.default_alignment, self.alignment
        if alignment is None:
            return default
        if isinstance(alignment, str):
            return replace(default, mode=alignment)
        return replace(default, **alignment.model_dump(exclude_none=True))


class OwnFields(AlignmentFields):
    """kvkeep's own fields of requests for a generation.

    speculate: whether to try tokens that the text has had before, which changes no bit of it; by
    default as the server.
    """

    speculate: bool | None = None

    def own_settings(self, context: RequestContext) -> dict[str, Any]:
        """Return these fields as settings of a `GenerationRequest`."""
        return {"alignment": self.alignment_options(context), "speculate": self.speculate}


def own_fields(*usages: Usage) -> dict[str, Any]:
    """Return the field `x_kvkeep` of an answer; {} if there is nothing to report.

    It counts tokens of the prompt that were forgotten, and those that the model sampled for earlier
    requests, and says how the prompt was aligned in place, or why it was not if that was asked for;
    and how many tokens of drafts were right.
    """
    evicted = max(usage.evicted for usage in usages)
    fields: dict[str, Any] = {"forgotten_prompt_tokens": evicted} if evicted else {}
    if usages[0].prompt_written:
        fields["written"] = usages[0].prompt_written
    aligned = next((usage for usage in usages if usage.reuse.mode == "in_place"), None)
    if aligned is not None:
        fields |= _in_place_fields(aligned)
    elif reason := next((usage.reuse.not_in_place for usage in usages), ""):
        fields |= {"reuse": "exact", "not_in_place": reason}
    if drafted := sum(usage.drafts.drafted for usage in usages):
        accepted = sum(usage.drafts.accepted for usage in usages)
        fields["speculation"] = {"accepted": accepted, "drafted": drafted}
    return {"x_kvkeep": fields} if fields else {}


def _in_place_fields(usage: Usage) -> Mapping[str, Any]:
    reuse = usage.reuse
    return {
        "reuse": reuse.mode,
        "seams": reuse.seams,
        "kept": reuse.tokens - reuse.moved,
        "moved": reuse.moved,
        "evaluated": usage.evaluated,
        "reread": reuse.reread,
    }
