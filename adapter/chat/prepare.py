"""Turn a chat request into a job: its prompt, its grammar and the parser of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import orjson

from ...backends import offload
from ...backends.base import (
    MEDIA,
    Generation,
    Grammar,
    Media,
    Preamble,
    Prompt,
    Sampling,
    Stops,
    Text,
)
from ...backends.errors import Unsupported, check_ids, check_length
from ...backends.grammar.gbnf import UnsupportedSchema
from ...backends.grammar.preamble import ends_with_token
from ...schemas import limits
from ...schemas.openai.messages import Message
from ..errors import InvalidRequest, wrong_value
from ..generation.choice import NO_ECHO, Echo, MessageFormat, Parser
from ..model_entry import ServedModel
from . import instruct
from .conversation import Style, plain_turns, turns_of
from .folding import ANY, fold, strictest
from .formats.base import FunctionSchema, GrammarRequest, TooLarge, prepared_grammar
from .media import media_of, readable
from .message import Shape
from .parsers import StrictCallParser, TextParser
from .profile import TemplateProfile, known_profile, known_profiles
from .reasoning import ReasoningParser, Tags
from .special_tokens import LIKELY, Rendered, as_ids, prompt_of, spellings_of
from .templates import AS_USUAL, Conversation, Reasoning, TemplateError, render, variables_of
from .tools import ToolSet, enforceable, unenforced, wrong_schema

_CONTENT, _TEXT = attrgetter("content"), itemgetter("content")
# Most requests have one of few shapes.
_shape = lru_cache(maxsize=16)(Shape)


class ChatTurn(NamedTuple):
    """A request for the next message of a conversation, independent of the API it came by.

    Args:
        size: size of the request in bytes; the work on a large one runs in a thread.
        owner: see `Generation`, also for `max_tokens`, `seeds`, `sampling` and `logprobs`.
        stops: stop sequences, which end the answer if its content contains them.
        tool_set: the tools that the model may call, or None.
        answer: the grammar of the answer, or None.
        format: the instruct format to use instead of the model's chat template, or None.
        variables: template variables from the request.
        reasoning: the reasoning that the request asks for.
        opening: the end of the prompt, if the request names it.
        is_plain: True if each message is known to be a role and a text (`are_plain`).
        reply: the ids of the tokens that the reply begins with.
        clips: see `Generation`.
    """

    messages: Sequence[Message]
    size: int
    owner: str
    max_tokens: int | None
    seeds: tuple[int | None, ...]
    stops: tuple[str, ...]
    sampling: Sampling
    logprobs: int | None = None
    tool_set: ToolSet | None = None
    answer: Grammar | None = None
    format: instruct.InstructFormat | None = None
    variables: Mapping[str, Any] | None = None
    reasoning: Reasoning = AS_USUAL
    opening: instruct.Opening | None = None
    is_plain: bool = False
    reply: Sequence[int] = ()
    clips: bool = False


class ChatJob(NamedTuple):
    """A job, and the form of the messages in its response.

    Args:
        form: the format that splits the output into parts; None if all of it is content.
        shape: the shape of the messages in the response.
        inexact: names of the API's fields that are only approximated.
        dropped: names of the API's fields for which the model's template has no setting.
        echo: the beginning of the reply that the request has sent.
    """

    job: Generation
    form: MessageFormat | None
    shape: Shape
    inexact: Sequence[str]
    dropped: Sequence[str] = ()
    echo: Echo = NO_ECHO


@dataclass(slots=True)
class _Markers:
    """The markers in a model's answer.

    Args:
        style: the way in which the model writes tool calls.
        tags: the tags around its reasoning; None if this answer has no reasoning.
        is_open: True if the prompt ends with the tag that begins the reasoning.
        is_over: True if the prompt ends with the tag that ends it.
        tokens: markers that count only as a token: text with the same spelling is not a marker.
        preserved_tokens: tokens whose spelling the engine must include in the text.
        interrupts: markers of calls whose tokens end the reasoning.
        ending: tokens that are stop sequences, and no markers.
    """

    style: Style
    tags: Tags | None
    is_open: bool
    is_over: bool
    tokens: frozenset[str] = frozenset()
    preserved_tokens: tuple[str, ...] = ()
    interrupts: frozenset[str] = frozenset()
    ending: frozenset[bytes] = frozenset()

    @property
    def preamble(self) -> Preamble | None:
        """The preamble of the answer, or None."""
        if self.style.is_one_of_several:
            return Preamble("", self.style.form.answer, True)
        if self.tags is None or self.is_over or self.interrupts:
            # A grammar for calls allows any text up to the first token that interrupts.
            return None
        return Preamble(self.tags.begin, self.tags.end, self.is_open, self.tokens)


def prepare_plain(turn: ChatTurn, served: ServedModel) -> ChatJob | None:
    """Return the job of texts that the template takes as they are; None for `prepare`.

    Most conversations are no more than that. None has tools, reasoning or control tokens.
    """
    model = served.model
    profile = known_profiles.known(model)
    if (
        profile is None
        or profile.splits
        or model.template is None
        or not turn.is_plain
        or turn.size > offload.SMALL
        or turn.tool_set is not None
        or turn.format is not None
        or turn.opening is not None
        or turn.reply
        or turn.variables
        or turn.reasoning is not AS_USUAL
        or served.policy.parse_content
    ):
        return None
    turns = plain_turns(turn.messages, profile.style, profile.tags)
    if turns is None or LIKELY.search("\n".join(map(_TEXT, turns))):
        return None
    if profile.order != ANY and fold(turns, profile.order, profile.style.null) is not turns:
        return None
    tools: Sequence[Any] | None = () if profile.style.empty else None
    try:
        text = render(model, {"messages": turns, "variables": {}, "tools": tools})
    except TemplateError:
        return None
    if not turn.clips:
        # Anthropic's clients compact by the true number of tokens, which the engine then counts.
        check_length(len(text), limits.TOKEN_SIZE.maximum, model.context, turn.max_tokens)
    job = Generation(
        Prompt(Text(text)),
        turn.max_tokens,
        turn.seeds,
        Stops(turn.stops),
        turn.sampling,
        turn.logprobs,
        turn.owner,
        turn.answer,
        fingerprint=model.fingerprint,
        clips=turn.clips,
    )
    return ChatJob(job, None, _shape(False, False, (), served.policy.reasoning), ())


async def prepare(turn: ChatTurn, served: ServedModel) -> ChatJob:
    """Return the job that answers a chat request.

    Raises:
        LatimerError: the request is invalid, or cannot be served.
    """
    if turn.reply:
        _check_reply(turn)
    if turn.format is not None:
        served = replace(served, model=replace(served.model, template=None))
    model = served.model
    profile = known_profiles.known(model) or await known_profile(model)
    media: tuple[Media, ...] = ()
    inexact: list[str] = []
    if list in map(type, map(_CONTENT, turn.messages)):
        messages, inexact = readable(turn.messages, served)
        media = await media_of(messages, served)
        turn = turn._replace(messages=messages)
    variables: Mapping[str, Any] = {}
    dropped: Sequence[str] = ()
    if turn.variables or turn.reasoning is not AS_USUAL:
        variables, dropped = variables_of(turn.variables, turn.reasoning, model)
    prompt, markers = await _prompt(turn, served, profile, variables, bool(media))
    if not turn.clips:
        check_length(len(prompt.text), limits.TOKEN_SIZE.maximum, model.context, turn.max_tokens)
    if media and prompt.text.count(MEDIA) != len(media):
        raise InvalidRequest(
            "The model's chat template omits some of the images or audio of these messages. Send "
            "them in a user message.",
            "messages",
        )
    if turn.tool_set is not None and turn.tool_set.mode == "none":
        # The prompt has shown them.
        turn = turn._replace(tool_set=None)
    stops = tuple(dict.fromkeys((*turn.stops, *markers)))
    if prompt.changed:
        inexact.append("messages")
    grammar, form = turn.answer, None
    preserved_tokens: tuple[str, ...] = ()
    if turn.tool_set is not None or profile.splits:
        special = await _special_of(turn, served, profile, prompt.text, stops)
        inputs = await enforceable(turn.tool_set, special.style.form)
        grammar, enforced = await _grammar(turn, served, special, inputs)
        inexact += unenforced(turn.tool_set, inputs if enforced else {})
        form, preserved_tokens = _form(special, turn.tool_set, enforced), special.preserved_tokens
    echo, is_cut = NO_ECHO, False
    if turn.reply:
        prompt, echo = await _begun(turn.reply, prompt, served, preserved_tokens, bool(media))
        is_cut = echo.is_cut
    job = Generation(
        Prompt(prompt.prompt, media=media, bos_count=prompt.bos_count, is_cut=is_cut),
        turn.max_tokens,
        turn.seeds,
        Stops(stops, by_reader=form is not None and bool(stops)),
        turn.sampling,
        logprobs=turn.logprobs,
        owner=turn.owner,
        grammar=grammar,
        preserved_tokens=preserved_tokens,
        fingerprint=model.fingerprint,
        clips=turn.clips,
    )
    field = served.policy.reasoning
    shape = _shape(form is not None, False, (), field)
    if turn.tool_set is not None:
        shape = Shape(True, turn.tool_set.legacy, turn.tool_set.custom, field)
    return ChatJob(job, form, shape, inexact, dropped, echo)


def _check_reply(turn: ChatTurn) -> None:
    """Refuse a reply that has begun and follows a grammar, which would begin again inside it."""
    forced = turn.tool_set is not None and turn.tool_set.mode != "auto"
    if turn.answer is not None or forced:
        other = "tool_choice" if turn.answer is None else turn.answer.param
        raise wrong_value(
            "reply_token_ids",
            f"not supported together with '{other}', whose grammar would begin again inside the "
            "reply. Omit one of them.",
        )


async def _begun(
    reply: Sequence[int],
    prompt: Rendered,
    served: ServedModel,
    marks: Sequence[str],
    has_media: bool,
) -> tuple[Rendered, Echo]:
    """Return a prompt that ends with the tokens that a reply begins with, and their text.

    Args:
        marks: the tokens whose spelling is part of the reply.

    Raises:
        Unsupported: the engine takes text only, which it would split into other tokens.
    """
    backend = served.backend
    pieces = await backend.token_bytes()
    if pieces is None:
        shown = [(await backend.detokenize(tuple(reply)), False)]
    else:
        check_ids("reply_token_ids", reply, len(pieces))
        spelled = {
            (await backend.tokenize(mark, add_special=False, parse_special=True))[-1]: mark.encode()
            for mark in marks
        }
        size = 16 * len(reply)
        shown = await offload.run(
            size, lambda: [(spelled.get(one, pieces[one]), one in spelled) for one in reply]
        )
    echo = Echo(b"".join(data for data, _ in shown), pieces=shown)
    takes_ids = pieces is not None and (not has_media or served.capabilities.media_among_ids)
    if takes_ids:
        begun = await as_ids(prompt, backend, has_media)
        return begun._replace(prompt=(*begun.prompt, *reply)), echo
    text = echo.data.decode(errors="replace")
    # Text up to an image is not split together with text after it.
    last = prompt.text.rpartition(MEDIA)[2]
    before, after = [
        await backend.tokenize(one, add_special=False, parse_special=True)
        for one in (last, f"{last}{text}")
    ]
    if not isinstance(prompt.prompt, Text) or after != (*before, *reply):
        what = "With images or audio, it" if has_media else "It"
        raise Unsupported(
            "reply_token_ids",
            served.capabilities.engine,
            f"{what} takes text only, which it splits into other tokens. Send the text of these "
            "as the last message, with the role 'assistant'.",
        )
    return prompt._replace(prompt=Text(f"{prompt.text}{text}")), echo


async def _prompt(
    turn: ChatTurn,
    served: ServedModel,
    profile: TemplateProfile,
    variables: Mapping[str, Any],
    has_media: bool,
) -> tuple[Rendered, Sequence[str]]:
    """Return the prompt, and the stop sequences of an instruct format.

    Raises:
        InvalidRequest: the template rejects the messages, or they must be folded under `strict`.
    """
    model, size, form = served.model, turn.size, turn.format
    if form is None and model.template is None:
        form = instruct.INSTRUCT_FORMATS["alpaca"]
    functions = turn.tool_set.listed if turn.tool_set is not None else ()
    order = profile.order_with_tools if functions else profile.order
    null = profile.style.null

    arguments = model, turn.messages, functions, profile.style, profile.tags, has_media
    if size <= offload.SMALL:
        turns, tools = turns_of(*arguments)
        messages = turns if order == ANY else fold(turns, order, null)
    else:
        turns, tools = await offload.run(size, turns_of, *arguments)
        messages = await offload.run(size, fold, turns, order, null)
    markers = () if form is None else form.stops(messages)
    conversation: Conversation = {"messages": messages, "variables": variables, "tools": tools}
    try:
        prompt = await _render(turn, served, form, conversation, has_media, messages is not turns)
    except TemplateError:
        # The template rejects an order that no sample conversation covers.
        again = await offload.run(size, fold, turns, strictest(order), null)
        if model.template is None or again is turns or again == messages:
            raise
        conversation["messages"] = again
        prompt = await _render(turn, served, form, conversation, has_media, True)
    return prompt, markers


async def _render(
    turn: ChatTurn,
    served: ServedModel,
    form: instruct.InstructFormat | None,
    conversation: Conversation,
    has_media: bool,
    is_folded: bool,
) -> Rendered:
    messages = conversation["messages"]
    if is_folded and served.policy.strict:
        raise wrong_value(
            "messages",
            "the model's chat template does not accept them as they are, and this server is "
            "strict and does not change them. Send at most one system message, as the first one; "
            "let user and assistant messages alternate; send one call per message, without "
            "content, and with a JSON object as its arguments.",
        )
    if turn.opening is not None:
        conversation["opening"] = turn.opening
        if form is not None and turn.opening != instruct.opening_of(messages):
            raise wrong_value(
                "add_generation_prompt",
                "an instruct format always begins the next turn, or continues the assistant's "
                "last message. Omit it.",
            )

    if served.policy.parse_content:
        show = partial(render, served.model, form=form)
        prompt = Rendered.of(await offload.run(turn.size, show, conversation))
    else:
        # Without a check, the engine counts the tokens, also of what cannot fit.
        limit = partial(check_length, context=served.model.context, max_tokens=turn.max_tokens)
        check = None if turn.clips else limit
        prompt = await prompt_of(
            served.model, conversation, served.backend, form, has_media, turn.size, check
        )
    return prompt._replace(changed=True) if is_folded else prompt


async def _special_of(
    turn: ChatTurn, served: ServedModel, profile: TemplateProfile, prompt: str, stops: Sequence[str]
) -> _Markers:
    style, tags = profile.style, profile.tags
    text = prompt.rstrip()
    is_open = tags is not None and text.endswith(tags.begin)
    is_over = tags is not None and text.endswith(tags.end)
    if is_over and tags is not None and not tags.label:
        tags = None
    found = _Markers(style, tags, is_open, is_over)
    wanted = {tags.begin, tags.end} if tags is not None else set()
    if turn.tool_set is not None or style.is_one_of_several:
        wanted |= set(style.form.markers)
    ending: set[str] = set()
    if turn.tool_set is not None or wanted:
        # The adapter then looks for the stop sequences, so their tokens must be in the text.
        ending = {stop for stop in stops if LIKELY.search(stop)} - wanted
    if not wanted and not ending:
        return found
    known = await spellings_of(served.backend, served.model)
    spelled, ending = (wanted | ending) & known, ending & known
    tokens = spelled if served.capabilities.marks_special else frozenset()
    if not style.native:
        # A model that reads about tools in the prompt may write the token, or spell it as text.
        tokens = tokens - set(style.form.markers)
    is_free = turn.tool_set is not None and turn.tool_set.mode == "auto" and turn.answer is None
    interrupts = style.form.openers if style.form.interrupts and is_free else ()
    return replace(
        found,
        tokens=frozenset(tokens),
        preserved_tokens=tuple(sorted(spelled)),
        interrupts=frozenset(interrupts) & tokens,
        ending=frozenset(map(str.encode, ending)),
    )


def _functions(tool_set: ToolSet, inputs: Mapping[str, Grammar]) -> tuple[FunctionSchema, ...]:
    """Return the functions in the form that grammars for tool calls need."""
    return tuple(
        FunctionSchema(
            function.name,
            None if function.parameters is None else orjson.dumps(function.parameters),
            bool(function.strict),
            inputs.get(function.name),
        )
        for _, function in tool_set.functions
    )


async def _grammar(
    turn: ChatTurn, served: ServedModel, special: _Markers, inputs: Mapping[str, Grammar]
) -> tuple[Grammar | None, bool]:
    """Return the grammar of each choice, and True if it enforces tool calls.

    Args:
        inputs: the grammars of custom tools' inputs.
    """
    tool_set, size = turn.tool_set, turn.size
    answer = None if turn.answer is None else turn.answer._replace(after=special.preamble)
    if tool_set is None or turn.reply:
        return answer, False
    form = special.style.form
    forced = tool_set.mode != "auto"
    if answer is not None and answer.kind != "json_schema":
        raise wrong_value(
            answer.param,
            "not supported together with tools, because a tool call follows another grammar. Omit "
            "one of them, or send a 'response_format' instead.",
        )
    alone = answer is None or forced
    param = "functions" if tool_set.legacy else "tools"
    capabilities = served.capabilities
    if "gbnf" not in capabilities.grammars:
        if forced:
            field = "function_call" if tool_set.legacy else "tool_choice"
            what = "GBNF grammars" if capabilities.grammars else "grammars"
            hint = f"It has no {what}. Let the model choose."
            raise Unsupported(field, capabilities.engine, hint)
        return answer, False
    # On some engines a grammar makes each token slower, also before a call.
    needs_it = bool(inputs) or any(one.strict for _, one in tool_set.functions)
    is_worth_it = capabilities.free_grammars or needs_it
    if not forced and alone and not (form.begin and is_worth_it):
        return None, False
    beside = None if answer is None or alone else answer._replace(after=None)
    functions = await offload.run(size, _functions, tool_set, inputs)
    after = None if special.style.is_one_of_several else special.preamble
    tokens, only_calls = special.tokens, forced or not alone
    if not only_calls and after is not None and not ends_with_token(after):
        # Other text than calls cannot be limited by a token there.
        tokens = frozenset()
    try:
        text = await prepared_grammar(
            GrammarRequest(form, functions, tool_set.parallel, only_calls, tokens, beside)
        )
    except TooLarge:
        if not forced and alone:
            return None, False
        raise wrong_value(
            param,
            "the grammar for these functions is too large. Send fewer strict functions, or let "
            "the model choose ('auto').",
            "array_above_max_length",
        ) from None
    except UnsupportedSchema as error:
        index, function = tool_set.functions[int(error.path[0])]
        error = UnsupportedSchema(error.reason, error.path[1:])
        path = f"{tool_set.paths[index]}.parameters{error.where}"
        raise wrong_schema(function.name, error, path) from None
    return Grammar("gbnf", text, param, after, is_own=True), True


def _form(special: _Markers, tool_set: ToolSet | None, enforced: bool) -> MessageFormat | None:
    """Return the format that splits an answer into parts; None if all of it is content."""
    if tool_set is None and special.tags is None and not special.style.is_one_of_several:
        return None
    functions = tool_set.functions if tool_set is not None else ()
    schemas = {one.name: one.parameters for _, one in functions}
    strict = {} if enforced else {one.name: one.parameters for _, one in functions if one.strict}
    forced = enforced and tool_set is not None and tool_set.mode != "auto"

    def parser() -> Parser:
        own: Parser = TextParser()
        if tool_set is not None or special.style.is_one_of_several:
            own = special.style.form.parser(schemas, special.tokens, enforced, forced)
        if strict:
            own = StrictCallParser(own, strict)
        tags = special.tags
        if tags is None:
            return own
        return ReasoningParser(tags, special.is_open, special.tokens, own, special.interrupts)

    if tool_set is None:
        return MessageFormat(parser, ending=special.ending)
    return MessageFormat(parser, tool_set.called, tool_set.parallel, special.ending)
