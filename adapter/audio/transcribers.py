"""The transcriber of a request (contract of audio, sections 3, 4 and 6)."""

from __future__ import annotations

from typing import NamedTuple

from ...backends.queue import Ticket
from ...backends.speech.base import Transcriber, TranscriberFacts
from ..admission import AudioUse, admitted_for_audio, ticket_of
from ..errors import InvalidRequest
from ..model_entry import ServedModel
from ..request import Exchange
from ..service import Service
from .audio_model import AudioModel

OPENAI_MODELS = frozenset(
    {
        "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-4o-transcribe-diarize",
        "gpt-transcribe",
    }
)  # fmt: skip


class Chosen(NamedTuple):
    """The transcriber of a request, and its model.

    Args:
        served: the model whose rules and limits apply.
        engine: the name of what transcribes, for messages and metrics.
        ticket: the request, as the queue of an engine knows it.
        is_exact: False if it stands for one of OpenAI's models.
    """

    transcriber: Transcriber
    facts: TranscriberFacts
    served: ServedModel
    engine: str
    ticket: Ticket
    is_exact: bool


async def transcriber_for(exchange: Exchange, service: Service, name: str) -> Chosen:
    """Return what transcribes for a model name: the server's own transcriber, or the engine.

    Raises:
        InvalidRequest: no model has the name; or nothing transcribes: 404, as for a path that is
            not served.
        LatimerError: see `admission.admitted`.
    """
    use = AudioUse(service.transcriber, _transcribes, OPENAI_MODELS, _nothing(exchange.place))
    served, is_exact = await admitted_for_audio(exchange, service, name, use)
    engine = served.capabilities.engine
    own = service.transcriber
    if own is not None:
        facts = await own.facts()
        ticket = Ticket()
        ticket.engine = facts.name
        return Chosen(own, facts, served, facts.name, ticket, is_exact)
    ticket = ticket_of(exchange, served)
    found = await served.backend.transcriber()
    if found is None and "audio" in served.model.media:
        found = AudioModel(served, exchange.owner)
    if found is None:
        raise _nothing(exchange.place)
    return Chosen(found, await found.facts(), served, engine, ticket, is_exact)


def _nothing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"This server does not serve {path}, because nothing here transcribes. Start it with "
        "--transcription, or with an engine or a model that hears.",
        code="unsupported_endpoint",
        status=404,
    )


async def _transcribes(served: ServedModel) -> bool:
    return "audio" in served.model.media or await served.backend.transcriber() is not None
