"""Model outputs in the formats with a tag for each argument, and DeepSeek V3.1's; see `outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Outputs: TypeAlias = Sequence[tuple[str, Sequence[str | tuple[str, str]]]]

_PARIS = ("get_weather", '{"city":"Paris"}')
_SPACED = ("get_weather", '{"city": "Paris"}')
_ROME = ("get_time", '{"city":"Rome"}')

# https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct, its chat template; values are text.
_CITY = "<parameter=city>\nParis\n</parameter>\n"
XML: Outputs = [
    (f"<tool_call>\n<function=get_weather>\n{_CITY}</function>\n</tool_call>", [_PARIS]),
    (f"I look.\n<tool_call>\n<function=get_weather>\n{_CITY}</function>\n</tool_call>\n"
     "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
     ["I look.", _PARIS, ("get_time", "{}")]),
    ("<tool_call><function=get_time></function></tool_call>", [("get_time", "{}")]),
    ("<tool_call>\n<function=get_weather>\n<parameter=city>\nL'\"é\"\n<b>\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     [("get_weather", '{"city":"L\'\\"é\\"\\n<b>","days":3}')]),
    ("<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
     "<parameter=at>\n[1, {}]\n</parameter>\n</function>",
     [("get_weather", '{"city":"12","at":[1, {}]}')]),
    ("<tool_call><function=get_time><parameter=$at (é)>now</parameter></function></tool_call>",
     [("get_time", '{"$at (é)":"now"}')]),
    ("No <function=get_time> here", ["No <function=get_time> here"]),
    # Broken: cut off, JSON, an unknown function, a repeated parameter, text for an integer.
    ("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
     ["<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"]),
    ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
     ['<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>']),
    ("<tool_call><function=launch></function></tool_call>",
     ["<tool_call><function=launch></function></tool_call>"]),
    (f"<tool_call><function=get_weather>{_CITY}{_CITY}</function>",
     [f"<tool_call><function=get_weather>{_CITY}{_CITY}</function>"]),
    ("<tool_call><function=get_weather><parameter=days>\nsome\n</parameter></function>",
     ["<tool_call><function=get_weather><parameter=days>\nsome\n</parameter></function>"]),
]  # fmt: skip

# The chat templates of https://huggingface.co/zai-org/GLM-4.6 (with lines) and
# https://huggingface.co/zai-org/GLM-4.7-Flash (without).
_KEY = "<arg_key>city</arg_key>"
GLM: Outputs = [
    (f"<tool_call>get_weather\n{_KEY}\n<arg_value>Paris</arg_value>\n</tool_call>", [_PARIS]),
    (f"<tool_call>get_weather{_KEY}<arg_value>Paris</arg_value></tool_call>", [_PARIS]),
    (f"\nI look.\n<tool_call>get_weather\n{_KEY}\n<arg_value>Paris</arg_value>\n</tool_call>\n"
     f"<tool_call>get_time\n{_KEY}\n<arg_value>Rome</arg_value>\n</tool_call>",
     ["\nI look.", _PARIS, _ROME]),
    ("<tool_call>get_time\n</tool_call>", [("get_time", "{}")]),
    ("<tool_call>get_time</tool_call>\nDone.", [("get_time", "{}"), "\nDone."]),
    (f"<tool_call>get_weather\n{_KEY}\n<arg_value>\nL'\"é\" <b>\n</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
     [("get_weather", '{"city":"\\nL\'\\"é\\" <b>\\n","days":3}')]),
    (f"<tool_call>get_weather\n{_KEY}\n<arg_value>true</arg_value>\n<arg_key>at</arg_key>\n"
     '<arg_value>{"a": [1, {"b": "中"}]}</arg_value>\n</tool_call>',
     [("get_weather", '{"city":"true","at":{"a": [1, {"b": "中"}]}}')]),
    ("It is 21 degrees in Paris <tool", ["It is 21 degrees in Paris <tool"]),
    # Broken: cut off, JSON, an unknown function, a key twice, text for an integer.
    (f"<tool_call>get_weather\n{_KEY}\n<arg_value>Par",
     [f"<tool_call>get_weather\n{_KEY}\n<arg_value>Par"]),
    ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
     ['<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>']),
    ("<tool_call>launch\n</tool_call>", ["<tool_call>launch\n</tool_call>"]),
    (f"<tool_call>get_time{_KEY}<arg_value>a</arg_value>{_KEY}<arg_value>b</arg_value></tool_call>",
     [f"<tool_call>get_time{_KEY}<arg_value>a</arg_value>{_KEY}<arg_value>b</arg_value>"
      "</tool_call>"]),
    ("<tool_call>get_weather<arg_key>days</arg_key><arg_value>some</arg_value></tool_call> No.",
     ["<tool_call>get_weather<arg_key>days</arg_key><arg_value>some</arg_value></tool_call> No."]),
]  # fmt: skip

# https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md.
_INVOKE = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
MINIMAX: Outputs = [
    (f"<minimax:tool_call>\n{_INVOKE}</minimax:tool_call>", [_PARIS]),
    (f"I look.\n\n<minimax:tool_call>\n{_INVOKE}"
     '<invoke name="get_time">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
     "</minimax:tool_call>", ["I look.", _PARIS, _ROME]),
    ('<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>\n',
     [("get_time", "{}")]),
    ('<minimax:tool_call><invoke name="get_time"></invoke></minimax:tool_call>',
     [("get_time", "{}")]),
    ('<minimax:tool_call>\n<invoke name="brave_search">\n<parameter name="query_tag">'
     '["technology", "events"]</parameter>\n<parameter name="query_list">["\\"OpenAI\\" '
     '\\"latest\\" \\"release\\""]</parameter>\n</invoke>\n</minimax:tool_call>',
     [("brave_search", '{"query_tag":["technology", "events"],"query_list":["\\"OpenAI\\" '
       '\\"latest\\" \\"release\\""]}')]),
    ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">L\'"é"\n<b>'
     '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
     [("get_weather", '{"city":"L\'\\"é\\"\\n<b>","days":3}')]),
    # Without the marker after the calls, they are complete.
    (f"<minimax:tool_call>\n{_INVOKE}", [_PARIS]),
    ("Use <minimax:tool> for that", ["Use <minimax:tool> for that"]),
    # Broken: cut off, JSON, and after a complete call: an unknown function, a part, a text.
    ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par',
     ['<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par']),
    ('<minimax:tool_call>\n{"name": "get_time"}\n</minimax:tool_call>',
     ['<minimax:tool_call>\n{"name": "get_time"}\n</minimax:tool_call>']),
    (f'<minimax:tool_call>\n{_INVOKE}<invoke name="launch"></invoke>\n</minimax:tool_call>',
     [_PARIS, '\n<invoke name="launch"></invoke>\n</minimax:tool_call>']),
    (f'<minimax:tool_call>\n{_INVOKE}<invoke name="get_time">\n<parameter',
     [_PARIS, '\n<invoke name="get_time">\n<parameter']),
    (f"<minimax:tool_call>\n{_INVOKE}<invoke na", [_PARIS]),
    (f"<minimax:tool_call>\n{_INVOKE}and\n</minimax:tool_call>",
     [_PARIS, "\nand\n</minimax:tool_call>"]),
]  # fmt: skip

# https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/README.md, and the tests of
# its encoding.
_D = "｜DSML｜"
_DSML_CITY = f'<{_D}parameter name="city" string="true">{{}}</{_D}parameter>\n'
_SPECIAL = 'L\'"é"\n</b>中'
_DSML_PARIS = f'<{_D}invoke name="get_weather">\n{_DSML_CITY.format("Paris")}</{_D}invoke>\n'
_DSML_ROME = f'<{_D}invoke name="get_time">\n{_DSML_CITY.format("Rome")}</{_D}invoke>\n'


def _dsml(block: str) -> Outputs:
    """Return the outputs with the block's name in a version of the format."""
    begin, end = f"<{_D}{block}>\n", f"</{_D}{block}>"
    opened = f'{begin}<{_D}invoke name="get_weather">\n<{_D}parameter name="days" '
    closed = f"</{_D}parameter>\n</{_D}invoke>\n{end}"
    return [
        (begin + _DSML_PARIS + end, [_PARIS]),
        (f"I look.\n\n{begin}{_DSML_PARIS}{_DSML_ROME}{end}", ["I look.", _PARIS, _ROME]),
        (f'{begin}<{_D}invoke name="get_time">\n\n</{_D}invoke>\n{end}', [("get_time", "{}")]),
        (f'{opened}string="false">-14{closed}', [("get_weather", '{"days":-14}')]),
        (f'{begin}<{_D}invoke name="get_time">\n<{_D}parameter name="todo" string="false">'
         f'["buy milk", {{"a": null}}]{closed}',
         [("get_time", '{"todo":["buy milk", {"a": null}]}')]),
        # The tag says that a value is text, even if it is JSON, or could be a tag.
        (f'{begin}<{_D}invoke name="get_time">\n<{_D}parameter name="at" string="true">12'
         f"{closed}", [("get_time", '{"at":"12"}')]),
        (f'{begin}<{_D}invoke name="get_weather">\n{_DSML_CITY.format(_SPECIAL)}'
         f"</{_D}invoke>\n{end}", [("get_weather", '{"city":"L\'\\"é\\"\\n</b>中"}')]),
        (begin + _DSML_PARIS, [_PARIS]),
        (begin + _DSML_PARIS + _DSML_ROME[:59], [_PARIS, "\n" + _DSML_ROME[:59]]),
        (f"Write <{_D}calls> then.", [f"Write <{_D}calls> then."]),
        # Broken: cut off, no JSON, an unknown function, a parameter that does not say what it is.
        (begin + _DSML_PARIS[:60], [begin + _DSML_PARIS[:60]]),
        (f'{opened}string="false">some{closed}', [f'{opened}string="false">some{closed}']),
        (f'{begin}<{_D}invoke name="launch">\n</{_D}invoke>\n{end}',
         [f'{begin}<{_D}invoke name="launch">\n</{_D}invoke>\n{end}']),
        (f'{opened}">3{closed}', [f'{opened}">3{closed}']),
    ]  # fmt: skip


DEEPSEEK_V3_2 = _dsml("function_calls")
DEEPSEEK_V4 = _dsml("tool_calls")

# https://huggingface.co/deepseek-ai/DeepSeek-V3.1, its model card: "ToolCall", and the tests of
# llama.cpp's parser (`tests/test-chat.cpp`).
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_1 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_V3_1_ODD = '{"city": "<｜tool▁call▁end｜>\\n \\"é\\" }{", "at": {"x": [1, {"中": null}]}}'
_V3_1_PARIS = _V3_1.format(*_SPACED)
_SPACED_ROME = ("get_time", '{"city": "Rome"}')
DEEPSEEK_V3_1: Outputs = [
    (_CALLS + _V3_1_PARIS + _CALLS_END, [_SPACED]),
    (f"CONTENT{_CALLS}{_V3_1_PARIS}{_V3_1.format(*_SPACED_ROME)}{_CALLS_END}",
     ["CONTENT", _SPACED, _SPACED_ROME]),
    (f"{_CALLS}{_V3_1.format('get_time', '{}')}{_CALLS_END} done", [("get_time", "{}"), " done"]),
    (f"{_CALLS}\n{_V3_1_PARIS}\n{_CALLS_END}\n", [_SPACED]),
    (f"{_CALLS}{_V3_1.format('get_weather', _V3_1_ODD)}{_CALLS_END}",
     [("get_weather", _V3_1_ODD)]),
    ("It is 21 degrees <｜tool▁calls▁be", ["It is 21 degrees <｜tool▁calls▁be"]),
    # Without the last markers, which the end of the turn implies.
    (_CALLS + _V3_1_PARIS, [_SPACED]),
    (f"{_CALLS}{_V3_1_PARIS.removesuffix('<｜tool▁call▁end｜>')}", [_SPACED]),
    # Broken: cut off in the name or after a call, DeepSeek R1's calls, an unknown function, a list.
    (f"{_CALLS}<｜tool▁call▁begin｜>get_we", [f"{_CALLS}<｜tool▁call▁begin｜>get_we"]),
    (f"{_CALLS}{_V3_1_PARIS}<｜tool▁ca", [_SPACED]),
    (f"{_CALLS}{_V3_1_PARIS}{_V3_1.format(*_SPACED_ROME)[:-30]}",
     [_SPACED, _V3_1.format(*_SPACED_ROME)[:-30]]),
    (f"{_CALLS}{_V3_1.format('function', 'get_time')}",
     [f"{_CALLS}{_V3_1.format('function', 'get_time')}"]),
    (f"{_CALLS}{_V3_1.format('launch', '{}')}", [f"{_CALLS}{_V3_1.format('launch', '{}')}"]),
    (f"{_CALLS}{_V3_1.format('get_time', '[1]')}",
     [f"{_CALLS}{_V3_1.format('get_time', '[1]')}"]),
]  # fmt: skip
