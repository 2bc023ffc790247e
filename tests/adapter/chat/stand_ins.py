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

# Shows results in the message of their calls, and its content after them.
GEMMA_4 = (
    '{% macro value(one) %}{% if one is string %}<|"|>{{ one }}<|"|>'
    "{% elif one is mapping %}{{ '{' }}{% for k, v in one | dictsort %}{{ k }}:{{ value(v) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% else %}{{ one | tojson }}{% endif %}"
    "{% endmacro %}"
    "{% if enable_thinking or tools %}<|turn>system\n{% if enable_thinking %}<|think|>\n{% endif %}"
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}"
    "{{ value({'description': t.function.description}) }}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% if not (ns.open and role == 'model') %}<|turn>{{ role }}\n{% endif %}"
    "{% set ns.open = false %}"
    "{% if m.reasoning_content and m.tool_calls %}"
    "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}"
    "{{ value(c.function.arguments) }}<tool_call|>{% endfor %}"
    "{% if m.tool_calls %}{% for r in messages[loop.index:] if r.role == 'tool' %}"
    "{% for c in m.tool_calls if c.id == r.tool_call_id %}{% set ns.open = true %}"
    "<|tool_response>response:{{ c.function.name }}{{ value({'value': r.content}) }}"
    "<tool_response|>{% endfor %}{% endfor %}{% endif %}{{ m.content or '' }}"
    "{% if not ns.open %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)

# The same with results in the message of their calls, as in the first template.
GEMMA_4_FIRST = (
    GEMMA_4.replace("messages[loop.index:] if r.role == 'tool'", "m.tool_responses or []")
    .replace("{% for c in m.tool_calls if c.id == r.tool_call_id %}", "{% if true %}")
    .replace("<tool_response|>{% endfor %}", "<tool_response|>{% endif %}")
    .replace("response:{{ c.function.name }}", "response:{{ r.name }}")
    .replace("value({'value': r.content})", "value(r.response)")
)
_LFM_HEAD = (
    "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{% set ns.system = ns.system + 'List of tools: [' + tools | map('tojson') "
    "| join(', ') + ']' %}{% endif %}"
    "{% if ns.system %}<|im_start|>system\n{{ ns.system }}<|im_end|>\n{% endif %}"
)
_LFM_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Omits calls, so that they are written into the content.
LFM_2 = (
    _LFM_HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}"
    "<|tool_response_start|>{{ m.content }}<|tool_response_end|>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + _LFM_END
)
# Writes calls itself, and reasoning after the last user message.
LFM_2_5 = (
    _LFM_HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls is defined %}<|tool_call_start|>[{% for c in m.tool_calls %}"
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
    "{% else %}{{ v | string }}{% endif %}{{ '' if loop.last else ', ' }}{% endfor %})"
    "{{ '' if loop.last else ', ' }}{% endfor %}]<|tool_call_end|>{% endif %}"
    "<|im_end|>\n{% endfor %}" + _LFM_END
)

_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
# Cannot be rendered without a list of tools.
FUNCTIONARY_3_1 = (
    "{% set others = tools | rejectattr('type', 'equalto', 'code_interpreter') | list %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if others %}"
    "{% for t in others %}Use the function '{{ t.function.name }}':\n{{ t.function | tojson }}\n"
    "{% endfor %}{{ '<{start_tag}={function_name}>{parameters}{end_tag}\n' }}"
    "{% endif %}<|eot_id|>{% for m in messages %}"
    + _HEADER
    + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% if c.function.name == 'python' %}<|python_tag|>{{ c.function.arguments | tojson }}"
    "{% else %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>"
    "{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}" + _ASSISTANT + "{% endif %}"
)
# Takes arguments as text.
FUNCTIONARY_3_2 = (
    "<|start_header_id|>system<|end_header_id|>\n\nRespond in this format:\n>>>${recipient}\n"
    "{% for t in tools or [] %}// {{ t.function.description }}\ntype {{ t.function.name }}\n"
    "{% endfor %}<|eot_id|>{% for m in messages %}"
    + _HEADER
    + "{% if m.role != 'assistant' %}{{ m.content }}{% elif m.content %}>>>all\n{{ m.content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '>>>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}" + _ASSISTANT + ">>>{% endif %}"
)

# The templates by the titles of their formats.
STAND_INS: Mapping[str, str] = {
    "functionary-v3.1": FUNCTIONARY_3_1,
    "functionary-v3.2": FUNCTIONARY_3_2,
    "lfm2": LFM_2_5,
    "gemma4": GEMMA_4,
    "kimi-k2": KIMI_K2,
    "kimi-k2-first": KIMI_K2_FIRST,
}
