"""The duties of every engine's backend, as tests over any `Backend`.

A class of tests inherits `Duties`, and has a fixture `backend`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from latimer.backends.base import (
    Backend,
    Batch,
    Event,
    Finish,
    Generation,
    Grammar,
    Piece,
    Prompt,
    PromptTokens,
    Sampling,
    Stops,
    Text,
)
from latimer.backends.errors import (
    ContextExceeded,
    EmptyPrompt,
    ModelChanged,
    RequestError,
    UnknownToken,
    Unsupported,
)
from latimer.backends.queue import Ticket
from latimer.backends.stops import cut
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.common import SAMPLING_EXTRAS
from latimer.schemas.openai.completions import CompletionRequest
from latimer.schemas.openai.responses import ResponseRequest

DAY = Prompt(Text("One day,"))
GREEDY = Sampling(temperature=0.0)
JOB = Generation(DAY, 6, sampling=GREEDY)
# Three choices at temperature 1, whose texts differ.
SAMPLED = Generation(DAY, 8, (7, 8, 9))
REQUESTS = (ChatRequest, CompletionRequest, ResponseRequest)


async def batches_of(backend: Backend, job: Generation) -> list[Batch]:
    """Return the batches of a job."""
    async with backend.open(job) as batches:
        return [batch async for batch in batches]


async def events_of(backend: Backend, job: Generation) -> list[Event]:
    """Return the events of a job."""
    return [event for batch in await batches_of(backend, job) for event in batch]


async def answer_of(backend: Backend, job: Generation) -> tuple[bytes, Finish]:
    """Return the text of a job's only choice, and its end."""
    events = await events_of(backend, job)
    assert isinstance(events[-1], Finish)
    return b"".join(event.data for event in events if isinstance(event, Piece)), events[-1]


async def texts_of(backend: Backend, job: Generation) -> list[bytes]:
    """Return the text of each choice of a job."""
    events = await events_of(backend, job)
    pieces = [event for event in events if isinstance(event, Piece)]
    return [
        b"".join(piece.data for piece in pieces if piece.choice == choice)
        for choice in range(len(job.seeds))
    ]


class Duties:
    """The tests; an engine that refuses a field need not obey it."""

    async def test_a_choice_ends_once(self, backend: Backend) -> None:
        """No batch is empty, and each choice has one end, after its pieces."""
        batches = await batches_of(backend, replace(JOB, seeds=(1, 2, 3)))
        assert all(batches)
        events = [event for batch in batches for event in batch]
        for choice in range(3):
            own = [event for event in events if event.choice == choice]
            assert [isinstance(event, Finish) for event in own] == [False] * (len(own) - 1) + [True]

    async def test_the_limit_of_tokens_holds(self, backend: Backend) -> None:
        """A choice has at most `max_tokens` tokens, and `length` as its end if more would follow.

        0 tokens count the prompt.
        """
        text, finish = await answer_of(backend, JOB)
        begun, limited = await answer_of(backend, replace(JOB, max_tokens=2))
        assert limited.completion_tokens == 2
        assert limited.reason == "length"
        assert text.startswith(begun)
        nothing, none = await answer_of(backend, replace(JOB, max_tokens=0))
        assert (nothing, none.reason, none.completion_tokens) == (b"", "length", 0)
        assert none.prompt_tokens == limited.prompt_tokens == finish.prompt_tokens > 0

    async def test_an_empty_prompt_is_refused(self, backend: Backend) -> None:
        """A prompt without tokens is an error, if the model adds no BOS."""
        for prompt in (
            Prompt(()),
            *([] if (await backend.model()).adds_bos else [Prompt(Text(""))]),
        ):
            with pytest.raises(EmptyPrompt):
                await events_of(backend, replace(JOB, prompt=prompt))

    async def test_an_unknown_id_is_refused(self, backend: Backend) -> None:
        """A prompt with an id that the vocabulary lacks is an error, alone or among others."""
        known = await backend.tokenize("One", add_special=False, parse_special=True)
        for ids in ((2**31 - 1,), (*known, 2**31 - 1)):
            with pytest.raises((UnknownToken, Unsupported)):
                await events_of(backend, replace(JOB, prompt=Prompt(ids)))

    async def test_the_context_is_the_limit(self, backend: Backend) -> None:
        """A prompt or a limit beyond the context is an error, and one that may be cut is not."""
        context = (await backend.model()).context
        long = Prompt(Text("word " * context))
        for job in (replace(JOB, prompt=long), replace(JOB, max_tokens=context)):
            with pytest.raises(ContextExceeded) as caught:
                await events_of(backend, job)
            assert caught.value.context == context
        async with backend.open(replace(JOB, max_tokens=context, clips=True)) as batches:
            async for batch in batches:
                assert batch
                break

    async def test_another_model_gets_no_job(self, backend: Backend) -> None:
        """A job for another model is an error, if the engine can change its model, and one for this
        model is not."""
        if not backend.loads_here:
            with pytest.raises(ModelChanged):
                await events_of(backend, replace(JOB, fingerprint="another"))
        assert await events_of(
            backend, replace(JOB, fingerprint=(await backend.model()).fingerprint)
        )

    async def test_the_prompt_is_counted_first(self, backend: Backend) -> None:
        """The number of prompt tokens is known at the first event, and is that of the end."""
        job = replace(JOB, ticket=Ticket())
        assert job.ticket is not None
        async with backend.open(job) as batches:
            counts = [(job.ticket.input, batch) async for batch in batches]
        finish = counts[-1][1][-1]
        assert isinstance(finish, Finish)
        assert {count for count, _ in counts} == {finish.prompt_tokens}

    async def test_a_stop_sequence_ends_the_count(self, backend: Backend) -> None:
        """The text before a stop sequence is whole, and tokens from it on are not counted."""
        text, plain = await answer_of(backend, JOB)
        stop = text.decode(errors="ignore")[3]
        job = replace(JOB, stops=Stops((stop,)))
        found, finish = await answer_of(backend, job)
        end, _ = cut(text, (stop,))
        assert found.startswith(text[:end])
        assert finish.reason == "stop"
        assert 0 < finish.completion_tokens < plain.completion_tokens

    async def test_fields_are_obeyed_or_refused(self, backend: Backend) -> None:
        """Log-probabilities have the tokens of the text, biases and grammars hold, or the engine
        refuses them."""
        try:
            events = await events_of(backend, replace(JOB, logprobs=1))
        except RequestError:
            pass
        else:
            for event in events:
                if isinstance(event, Piece) and event.tokens:
                    assert b"".join(token.data for token in event.tokens) == event.data
            assert any(isinstance(event, Piece) and event.tokens for event in events)
        try:
            events = await events_of(backend, replace(JOB, prompt=replace(DAY, logprobs=0)))
        except RequestError:
            pass
        else:
            assert isinstance(events[0], PromptTokens)
        capabilities = backend.capabilities
        if "logit_bias" not in capabilities.refused:
            (token,) = (await backend.tokenize("!", add_special=False, parse_special=True))[:1]
            forced = replace(GREEDY, logit_bias=((token, 100.0),))
            text, _ = await answer_of(backend, replace(JOB, sampling=forced))
            assert set(text) == {ord("!")}
        if "gbnf" in capabilities.grammars:
            grammar = Grammar("gbnf", 'root ::= "Yes"', "grammar")
            text, _ = await answer_of(backend, replace(JOB, grammar=grammar))
            assert text == b"Yes"

    async def test_the_temperature_and_seeds_are_obeyed(self, backend: Backend) -> None:
        """At temperature 0 seeds have no effect, at 1 they give other texts and repeat them, or the
        engine refuses the field."""
        refused = backend.capabilities.refused
        texts = await texts_of(backend, SAMPLED)
        if "temperature" not in refused:
            greedy = await texts_of(backend, replace(JOB, seeds=SAMPLED.seeds))
            assert len(set(greedy)) == 1, "temperature 0 is random; obey or refuse 'temperature'"
            assert len(set(texts)) > 1, "each seed gives one text; obey or refuse 'temperature'"
        if "seed" not in refused:
            again = await texts_of(backend, SAMPLED)
            assert again == texts, "a seed does not repeat its text; obey or refuse 'seed'"

    async def test_top_p_is_obeyed(self, backend: Backend) -> None:
        """A `top_p` of 0 leaves the most likely token only, or the engine refuses the field."""
        if "top_p" not in backend.capabilities.refused:
            narrow = replace(SAMPLED, sampling=Sampling(top_p=0.0))
            plain, texts = await texts_of(backend, SAMPLED), await texts_of(backend, narrow)
            assert len(set(texts)) == 1 < len(set(plain)), "no effect; obey or refuse 'top_p'"

    def test_the_tables_name_fields(self, backend: Backend) -> None:
        """Each name in the tables of `Capabilities` is a field of a request."""
        fields = {name for request in REQUESTS for name in request.model_fields}
        capabilities = backend.capabilities
        assert capabilities.extras - SAMPLING_EXTRAS == set()
        assert capabilities.refused.keys() - fields == set()
        assert capabilities.inexact - fields == set()

    async def test_control_tokens_in_messages_can_be_text(self, backend: Backend) -> None:
        """An engine takes text without its control tokens, or else lists their spellings."""
        assert backend.capabilities.plain_text or await backend.special_tokens()
