"""Chat templates with the restrictions of published ones, each as short as possible."""

from __future__ import annotations

_SHOWN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
_CALLS = (
    '{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}"
)
_WITH_CALLS = "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
_XML = (
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
)

# A system message is the first one, as in Qwen 3.5; arguments must be an object.
FIRST = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _XML + "{% endfor %}" + _END
)  # fmt: skip
# A conversation has a user message.
ASKED = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found.') }}{% endif %}" + FIRST
)
# Roles alternate, without a system message, as in Gemma 2.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    + _SHOWN + "{% endfor %}" + _END
)  # fmt: skip
# Later system messages are omitted, as in gpt-oss.
OMITTING = (
    _TOOLS + "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + _WITH_CALLS + "{% endif %}{% endfor %}" + _END
)  # fmt: skip
# The last system message replaces the others at the head, as in DeepSeek R1.
REPLACING = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}\n"
    "{% for m in messages %}{% if m.role != 'system' %}" + _SHOWN + "{% endif %}{% endfor %}" + _END
)
# One call in a message, as in Llama 3.1.
ONE_CALL = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    + _WITH_CALLS + "{% endfor %}" + _END
)  # fmt: skip
_CALLED = "<|im_start|>assistant\n" + _CALLS + "<|im_end|>\n"
# The content of a message with a call is omitted, as in Llama 3.1 and Mistral Nemo.
SILENT = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}" + _CALLED + "{% else %}" + _SHOWN
    + "{% endif %}{% endfor %}" + _END
)  # fmt: skip
# The same if an answer follows, as in gpt-oss.
FORGETTING = (
    _TOOLS + "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.tool_calls and loop.index < ns.last %}"
    + _CALLED + "{% else %}" + _WITH_CALLS + "{% endif %}{% endfor %}" + _END
)  # fmt: skip
# Calls are omitted unless the content is null, as in DeepSeek V2.5.
NULL = (
    _TOOLS + "{% for m in messages %}{% if m.content is none %}" + _CALLED + "{% else %}" + _SHOWN
    + "{% endif %}{% endfor %}" + _END
)  # fmt: skip

STRICT = {
    "first": FIRST,
    "asked": ASKED,
    "alternating": ALTERNATING,
    "omitting": OMITTING,
    "replacing": REPLACING,
    "one call": ONE_CALL,
    "silent": SILENT,
    "forgetting": FORGETTING,
    "null": NULL,
}
