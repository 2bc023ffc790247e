"""Another model at the same address: checks that nothing of the old one is used."""

from __future__ import annotations

import asyncio

from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.engines.model import TEMPLATE, Model

from faults.case import Act, Case
from faults.client import ask, encoded
from faults.stage import Stage

OTHER = "[OTHER]" + TEMPLATE


def another_model(what: str, closes: bool) -> Act:
    """Return an act that changes the fake engine's model, sends requests, and changes it back.

    Args:
        what: the part that changes: `name`, `template`, `vocabulary`, `context`, or `all`.
        closes: True to close connections in between, as a restart does. Otherwise only the
            engine's responses show the change, so the second reply must reflect it.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        fake = stage.fake
        assert isinstance(fake, FakeLlamaServer | FakeKoboldcpp)
        old = fake.model
        every = what == "all"
        # Every change of an engine also changes its name or path.
        fake.model = Model(
            name=f"another-{what}.gguf",
            template=OTHER if every or what == "template" else old.template,
            shift=7 if every or what == "vocabulary" else 0,
            context=64 if every or what == "context" else old.context,
        )
        try:
            if closes:
                await fake.restart()
                await asyncio.sleep(0.25)
            else:
                # The first response reveals the other model.
                await stage.small()
            return await _known(stage, fake)
        finally:
            # Real engines take longer to restart, and their start time identifies them.
            await asyncio.sleep(0.25)
            fake.model = old
            await fake.restart()
            await asyncio.sleep(0.25)
            await stage.small()

    return act


async def _known(stage: Stage, fake: FakeLlamaServer | FakeKoboldcpp) -> list[str]:
    """Check that every reply reflects the new model."""
    found, port, text = [], stage.latimer.port, stage.marker()
    model = fake.model
    messages = [{"role": "user", "content": f"echo:{text}"}]
    body = {"model": "m", "messages": messages, "logprobs": True, "max_tokens": 16}
    reply = await ask(port, encoded("/v1/chat/completions", body))
    if reply.status != 200:
        found.append(f"a chat fails: {reply}")
    else:
        choice = reply.json()["choices"][0]
        told = "".join(one["token"] for one in choice["logprobs"]["content"])
        if (choice["message"]["content"], told) != (text, text):
            found.append(f"the answer is {choice['message']['content']!r}, its tokens are {told!r}")
        if model.template == OTHER and "[OTHER]" not in fake.seen[-1]:
            found.append(f"the prompt was made with the old template: {fake.seen[-1]!r}")
    tokens = (await ask(port, encoded("/v1/tokenize", {"model": "m", "prompt": "ab"}))).json()
    if not tokens or tokens.get("tokens", [])[-2:] != model.ids("ab"):
        found.append(f"the tokens of a text are {tokens}, not {model.ids('ab')}")
    elif tokens["max_model_len"] != model.context:
        found.append(f"the context is {tokens['max_model_len']}, not {model.context}")
    back = await ask(port, encoded("/v1/detokenize", {"model": "m", "tokens": model.ids("ab")}))
    if (back.json() or {}).get("prompt") != "ab":
        found.append(f"the text of tokens is {back}")
    long = {"model": "m", "prompt": "a" * 100 + f" echo:{text}", "max_tokens": 16}
    reply = await ask(port, encoded("/v1/completions", long))
    if model.context < 100 and "context_length_exceeded" not in str(reply):
        found.append(f"a prompt longer than the new context: {reply}")
    names = (await ask(port, encoded("/v1/models", method="GET"))).json()
    if names["data"][0]["id"] != model.name:
        found.append(f"the model is called {names['data'][0]['id']}, not {model.name}")
    return found
