"""A chat request as a job: its prompt, and how what comes back is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import orjson

from ..backends import offload
from ..backends.base import MEDIA, Generation, Grammar, Passage, Sampling, Text
from ..backends.errors import ContextExceeded, RequestError, Unsupported, check_length
from ..backends.structured import Unenforced
from ..schemas import limits
from ..schemas.openai.chat import ChatRequest
from . import instruct
from .content import LIKELY, Rendered, prompt_of, spellings_of
from .errors import chat_context_error
from .exchange import Exchange
from .formats import grammar_of
from .media import media_of
from .message import Shape
from .parts import Cutter, Form, Reader
from .readers import grammar as calls_grammar
from .readers.formats import Format
from .readers.harmony import CHANNEL, MESSAGE
from .readers.markers import Plain
from .readers.thinking import Thinking
from .reasoning import Tags, tags_of
from .service import Served
from .templates import Talk, render, variables_of
from .tools import Offer, offer_of, wrong_schema
from .turns import Style, known_style_of, turns_of
from .validation import seeds_of, stops_of

_FINAL = f"{CHANNEL}final{MESSAGE}"


class ChatJob(NamedTuple):
    """A job, and how its choices are shown.

    Args:
        form: how they are taken apart, None where all that comes is content.
        shape: how their messages are shown.
        inexact: what of it is only nearly right, by the names that a client knows.
    """

    job: Generation
    form: Form | None
    shape: Shape
    inexact: Sequence[str]


class _Prompt(NamedTuple):
    """A prompt, as text as well, and what begins somebody else's turn where only text tells."""

    rendered: Rendered
    text: str
    markers: Sequence[str]


class _Marks(NamedTuple):
    """What a model's answer is made of beside text.

    Args:
        style: how it writes calls.
        tags: what stands around its thoughts, None where it thinks of nothing now.
        is_open: whether the prompt has begun a thought.
        tokens: those of all these that are tokens of the model's, so that no text is one.
        visible: tokens that an engine has to be asked for.
    """

    style: Style
    tags: Tags | None
    is_open: bool
    tokens: frozenset[str]
    visible: tuple[str, ...]

    @property
    def is_harmony(self) -> bool:
        """Whether the answer is one of several messages."""
        return self.style.form.title == "harmony" and self.style.native

    @property
    def passage(self) -> Passage | None:
        """What comes before an answer."""
        if self.is_harmony:
            return Passage("", _FINAL, True)
        if self.tags is None:
            return None
        return Passage(self.tags.begin, self.tags.end, self.is_open, self.tokens)


async def chat_job(
    exchange: Exchange, request: ChatRequest, served: Served, sampling: Sampling
) -> ChatJob:
    """The job that answers a request.

    Raises:
        LatimerError: something of the request is wrong, or cannot be served.
    """
    capabilities = served.capabilities
    own_format = _own_format(request, served)
    if own_format is not None and request.chat_template_kwargs:
        hint = "An instruct format has no variables; leave one of them out."
        raise Unsupported("chat_template_kwargs", capabilities.engine, hint)
    if own_format is not None:
        served = served._replace(model=replace(served.model, template=None))
    model = served.model
    style = await known_style_of(model)
    tags = tags_of(model.template) if model.template is not None else None
    offer = None
    if request.tools or request.functions:
        offer = await offload.run(exchange.size, offer_of, request, capabilities.engine)
    media = await media_of(request.messages, served)
    prompt = await _prompt(
        request, served, own_format, style, tags, offer, bool(media), exchange.size
    )
    max_tokens = request.max_tokens or request.max_completion_tokens
    try:
        check_length(len(prompt.text), limits.TOKEN_SIZE.most, model.context, max_tokens)
    except ContextExceeded as error:
        raise chat_context_error(error) from None
    if media and prompt.text.count(MEDIA) != len(media):
        raise RequestError(
            "The model's chat template leaves out some of the images or sounds of these messages. "
            "Send them in a user's message.",
            "messages",
        )
    stops = tuple(dict.fromkeys((*stops_of(request.stop), *prompt.markers)))
    marks = await _marks_of(served, style, tags, prompt, offer, stops)
    grammar, sure = await _grammar(request, served, offer, marks, exchange.size)
    form = _form(marks, offer, sure)
    scan = None if form is None or not stops else lambda: Cutter(form.reader(), stops)
    shape = Shape(form is not None)
    if offer is not None:
        shape = Shape(True, offer.legacy, offer.custom)
    job = Generation(
        prompt.rendered.prompt,
        max_tokens,
        seeds_of(request.seed, request.n or 1),
        stops,
        sampling,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        owner=exchange.owner,
        grammar=grammar,
        hidden=prompt.rendered.hidden,
        visible=marks.visible,
        media=media,
        scan=scan,
        fingerprint=model.fingerprint,
    )
    inexact = ["messages"] if prompt.rendered.changed else []
    if media and not capabilities.counts_media:
        inexact.append("usage")
    return ChatJob(job, form, shape, inexact)


def _own_format(request: ChatRequest, served: Served) -> instruct.Format | None:
    """What stands around each turn instead of the model's template; None where that is rendered."""
    if request.adapter is not None:
        return instruct.format_of(request.adapter)
    name = served.policy.chat_format
    return None if name is None else instruct.FORMATS[name]


async def _prompt(
    request: ChatRequest,
    served: Served,
    own_format: instruct.Format | None,
    style: Style,
    tags: Tags | None,
    offer: Offer | None,
    has_media: bool,
    size: int,
) -> _Prompt:
    model = served.model
    told = offer.told if offer is not None else ()
    arguments = model, request.messages, told, style, tags
    messages, tools = (
        turns_of(*arguments)
        if size <= offload.SMALL
        else await offload.run(size, turns_of, *arguments)
    )
    talk: Talk = {
        "messages": messages,
        "variables": variables_of(request, model, served.capabilities.engine),
        "tools": tools,
    }
    if own_format is None and model.template is None:
        own_format = instruct.FORMATS["alpaca"]
    shown = ""

    def show(talk: Talk) -> str:
        nonlocal shown
        shown = render(model, talk) if own_format is None else own_format.render(talk["messages"])
        return shown

    markers = () if own_format is None else own_format.stops(messages)
    if served.policy.parse_content:
        rendered = Rendered(Text(await offload.run(size, show, talk)))
    else:
        rendered = await prompt_of(model, talk, served.backend, show, has_media, size)
    return _Prompt(rendered, shown, markers)


async def _marks_of(
    served: Served,
    style: Style,
    tags: Tags | None,
    prompt: _Prompt,
    offer: Offer | None,
    stops: Sequence[str],
) -> _Marks:
    text = prompt.text.rstrip()
    is_open = tags is not None and text.endswith(tags.begin)
    if tags is not None and text.endswith(tags.end):
        tags = None
    found = _Marks(style, tags, is_open, frozenset(), ())
    wanted = set(tags) if tags is not None else set()
    if offer is not None or found.is_harmony:
        wanted |= set(style.form.markers)
    if offer is not None or wanted:
        # Stops are looked for here then, in what can be seen.
        wanted |= {stop for stop in stops if LIKELY.search(stop)}
    if not wanted:
        return found
    spelled = wanted & await spellings_of(served.backend, served.model)
    tokens = spelled if served.capabilities.marks else frozenset()
    if not style.native:
        # A model that was told in words may use its token, or spell it as it was told.
        tokens = tokens - set(style.form.markers)
    return found._replace(tokens=frozenset(tokens), visible=tuple(sorted(spelled)))


def _functions(offer: Offer) -> tuple[tuple[str, bytes | None, bool], ...]:
    """Functions as grammars for calls are made of them."""
    return tuple(
        (
            function.name,
            None if function.parameters is None else orjson.dumps(function.parameters),
            bool(function.strict),
        )
        for _, function in offer.functions
    )


async def _grammar(
    request: ChatRequest, served: Served, offer: Offer | None, marks: _Marks, size: int
) -> tuple[Grammar | None, bool]:
    """What each choice must look like, and whether it makes sure of calls.

    Args:
        size: bytes of the request's body.
    """
    capabilities = served.capabilities
    answer = (
        grammar_of(request, capabilities)
        if size <= offload.SMALL
        else await offload.run(size, grammar_of, request, capabilities)
    )
    answer = None if answer is None else answer._replace(after=marks.passage)
    if offer is None:
        return answer, False
    form = marks.style.form
    forced = offer.mode != "auto"
    alone = answer is None or (forced and answer.param.startswith("response_format"))
    if answer is not None and not alone and not answer.param.startswith("response_format"):
        raise RequestError(
            f"Invalid '{answer.param}': with tools an answer may be a call, which follows another "
            "grammar. Leave one of them out, or send a 'response_format'.",
            answer.param,
            "invalid_value",
        )
    if not forced and alone and not _is_lazy(form, served):
        return None, False
    param = "functions" if offer.legacy else "tools"
    beside = None if answer is None or alone else answer._replace(after=None)
    functions = await offload.run(size, _functions, offer)
    try:
        text = await calls_grammar.prepared(
            calls_grammar.Request(
                form, functions, offer.parallel, forced or not alone, marks.tokens, beside
            )
        )
    except calls_grammar.TooLarge:
        if not forced and alone:
            return None, False
        raise RequestError(
            f"Invalid '{param}': no grammar can be made for so many functions at once. Offer fewer "
            "that are strict, or leave the choice to the model.",
            param,
            "array_above_max_length",
        ) from None
    except Unenforced as error:
        index, function = offer.functions[int(error.path[0])]
        error = Unenforced(error.reason, error.path[1:])
        path = f"{offer.path(index)}.parameters{error.where}"
        raise wrong_schema(function.name, error, path) from None
    after = None if marks.is_harmony else marks.passage
    return Grammar("gbnf", text, param, after, is_own=True), True


def _is_lazy(form: Format, served: Served) -> bool:
    """Whether calls that the model makes by itself can be followed by a grammar."""
    return bool(form.begin) and served.capabilities.free_grammars


def _form(marks: _Marks, offer: Offer | None, sure: bool) -> Form | None:
    """How an answer is taken apart; None where all of it is content."""
    if offer is None and marks.tags is None and not marks.is_harmony:
        return None
    schemas = {one.name: one.parameters for _, one in offer.functions} if offer is not None else {}
    forced = sure and offer is not None and offer.mode != "auto"

    def reader() -> Reader:
        own: Reader = Plain()
        if offer is not None or marks.is_harmony:
            own = marks.style.form.reader(schemas, marks.tokens, sure, forced)
        tags = marks.tags
        if tags is None:
            return own
        return Thinking(tags.begin, tags.end, marks.is_open, marks.tokens, own)

    return Form(reader) if offer is None else Form(reader, offer.called, offer.parallel)
