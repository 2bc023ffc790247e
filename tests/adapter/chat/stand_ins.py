"""Short chat templates in the manner of published ones that are not in `tests/templates`.

Each takes tools, calls, results and reasoning as its model's own template does.
"""

from __future__ import annotations

from collections.abc import Mapping

_KIMI_HEAD = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% set seen = namespace(count=0, ids=[]) %}{% for m in messages %}"
    "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>"
    "{{ m.get('name') or m.role }}<|im_middle|>"
)
_KIMI_CALL = (
    "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>"
)
_KIMI_END = (
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{% endif %}"
)
# Numbers all calls of a conversation, and takes results in the order of the calls.
KIMI_K2 = (
    _KIMI_HEAD + "{% if m.role == 'tool' %}## Return of {{ seen.ids.pop(0) }}\n{% endif %}"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "{% set id = 'functions.' + c.function.name + ':' + (seen.count | string) %}"
    "{% set seen.count = seen.count + 1 %}{% set _ = seen.ids.append(id) %}"
    + _KIMI_CALL
    + "{% endfor %}<|tool_calls_section_end|>{% endif %}"
    + _KIMI_END
)
# Numbers the calls of each message, and takes the ids of results from the messages.
KIMI_K2_FIRST = (
    _KIMI_HEAD + "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "{% set id = 'functions.' + c.function.name + ':' + loop.index0|string %}"
    + _KIMI_CALL
    + "{% endfor %}<|tool_calls_section_end|>{% endif %}"
    + _KIMI_END
)

# The templates by the titles of their formats.
STAND_INS: Mapping[str, str] = {
    "kimi-k2": KIMI_K2,
    "kimi-k2-first": KIMI_K2_FIRST,
}
