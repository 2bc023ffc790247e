"""A model that thinks, calls a tool twice, and answers, for tests of clients.

The template ends a prompt with the character of the step, and each step has a script. A client that
does not send reasoning back with the calls that follow it gets an answer that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.projector import projector
from support.scripted import WIDTH, scripted

TEMPLATE = """\
{% set seen = namespace(results=0, forgot=false, other=false) %}\
{% if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools>
For each call, write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>
{% for tool in tools %}{% if 'transfer_to' in tool.function.name %}\
{% set seen.other = true %}{% endif %}{% endfor %}{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\
{% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content or [] %}\
{% if part.type == 'text' %}{{ part.text }}{% else %}<__media__>{% endif %}{% endfor %}{% endif %}\
{% for call in message.tool_calls or [] %}\
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}\
}</tool_call>{% endfor %}<|im_end|>
{% if message.role == 'tool' %}{% set seen.results = seen.results + 1 %}{% endif %}\
{% if message.tool_calls and not message.reasoning_content %}{% set seen.forgot = true %}\
{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% if seen.forgot %}F{% elif not tools %}N{% elif seen.other %}O{% else %}{{ seen.results }}\
{% endif %}{% endif %}"""


def call(thought: str, name: str, **arguments: Any) -> tuple[str, str]:
    """Return the end of a thought and a call, in two tokens that differ from those of others."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"{thought}</think>\n<tool_call>{text[:20]}", f"{text[20:]}</tool_call>"


# By the character that ends a prompt: `N` without tools, `O` if the conversation can be handed
# over, else the number of results.
_FORGOTTEN = ("The reasoning ", "was not sent back.")
_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "N": ("<think>I know ", "the answer.</think>", "Paris is ", "the capital."),
    "O": ("<think>The other agent ", *call("knows.", "transfer_to_second")),
    "0": ("<think>I need ", *call("both cities.", "get_weather", city="Paris")),
    "1": ("<think>Now the ", *call("second city.", "get_weather", city="Rome")),
    "2": ("<think>I have ", "both now.</think>", "It is 21 degrees in Paris ", "and 18 in Rome."),
}


def stepped(path: Path, scripts: Mapping[str, tuple[str, ...]], context: int = 4096) -> Path:
    """Write a model with the given scripts."""
    return scripted(path, _FORGOTTEN, TEMPLATE, after="F", context=context, others=scripts)


def in_steps(folder: Path) -> tuple[Path, Path]:
    """Write the model, and a projector with which it takes images."""
    model = stepped(folder / "steps.gguf", _SCRIPTS)
    return model, projector(folder / "steps-mmproj.gguf", WIDTH)
