"""The transcriber of a request (contract of audio, sections 3, 4 and 6)."""

from __future__ import annotations

from typing import NamedTuple

from ...backends.queue import Ticket
from ...backends.speech.base import Transcriber, TranscriberFacts
from ..admission import admitted, admitted_to_own, ticket_of, with_own
from ..errors import InvalidRequest, UnknownModel
from ..request import Exchange
from ..service import ServedModel, Service
from .audio_model import AudioModel

# The names of OpenAI's models. Clients have them as defaults, so the transcriber here answers to
# them, unless a model is served by that name.
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
        party: the request, as the queue of an engine knows it.
        is_exact: False if it stands for one of OpenAI's models.
    """

    transcriber: Transcriber
    facts: TranscriberFacts
    served: ServedModel
    engine: str
    party: Ticket
    is_exact: bool


async def transcriber_for(exchange: Exchange, service: Service, name: str, path: str) -> Chosen:
    """Return what transcribes for a model name: the server's own transcriber, or the engine.

    Args:
        path: the path of the request, for errors.

    Raises:
        InvalidRequest: no model has the name; or nothing transcribes: 404, as for a path that is
            not served.
        LatimerError: see `admitted`.
    """
    served, is_exact = await _served(exchange, service, name, path)
    engine = served.capabilities.engine
    own = service.transcriber
    if own is not None:
        facts = await own.facts()
        return Chosen(own, facts, served, facts.name, Ticket(), is_exact)
    party = ticket_of(exchange, served)
    found = await served.backend.transcriber()
    if found is None and "audio" in served.model.media:
        found = AudioModel(served, exchange.owner)
    if found is None:
        raise _nothing(path)
    return Chosen(found, await found.facts(), served, engine, party, is_exact)


def _nothing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"This server does not serve {path}, because nothing here transcribes. Start it with "
        "--transcription, or with an engine or a model that hears.",
        code="unsupported_endpoint",
        status=404,
    )


async def _served(
    exchange: Exchange, service: Service, name: str, path: str
) -> tuple[ServedModel, bool]:
    """Return the model for a name, and False if the name is OpenAI's and stands for it."""
    try:
        return await admitted(exchange, service, name, 0), True
    except UnknownModel as error:
        own = service.transcriber
        if own is not None and service.is_own(own, name, exchange.grant):
            return await admitted_to_own(exchange, service), True
        if name not in OPENAI_MODELS:
            raise with_own(error, exchange, service, own) from None
        other = await _hearing(exchange, service)
        if other is None:
            raise _nothing(path) from None
    return await admitted(exchange, service, other, 0), False


async def _hearing(exchange: Exchange, service: Service) -> str | None:
    """Return the first model that the key may use and that transcribes; None if there is none."""
    for name, served in (await service.models(exchange.grant)).items():
        if service.transcriber is not None:
            return name
        if served is None:
            continue
        if "audio" in served.model.media or await served.backend.transcriber() is not None:
            return name
    return None
