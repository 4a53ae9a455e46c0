"""Answers of Functionary v3.2: `>>>` with the name of a tool and its JSON, or with `all`."""

from kvkeep.chat.bare_calls import NAMED_CALL
from kvkeep.chat.call_form import CallForm
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.output_format import BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps


def _read_recipient(reading: AnswerReading) -> Steps[None]:
    """Read a call by its name, or `all` before text, which is no text."""
    if (yield from reading.take("all\n")):
        reading.scanner.mark()
    else:
        yield from NAMED_CALL.read(reading)


FUNCTIONARY = OutputFormat(
    "functionary",
    signs=((">>>all",),),
    calls=(CallForm(">>>", (), _read_recipient), TAGGED),
    wrappers=(BlockMarkers("all\n", "<|eot_id|>"),),
    bare_calls=(NAMED_CALL,),
)
