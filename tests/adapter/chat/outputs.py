"""Model outputs in each tool call format, with the parts expected from them.

Each case is an output and its parts: texts and (name, arguments) pairs. The functions offered are
`get_weather`, `get_time`, `brave_search` and `python`. The outputs follow each format's
documentation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from .tag_outputs import DEEPSEEK_V3_1, DEEPSEEK_V3_2, DEEPSEEK_V4, GLM, MINIMAX, XML

Expected: TypeAlias = Sequence[str | tuple[str, str]]
Outputs: TypeAlias = Sequence[tuple[str, Expected]]

PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome"}'

# https://github.com/NousResearch/Hermes-Function-Calling, README: "Prompt Format for Function
# Calling", and https://qwen.readthedocs.io/en/latest/framework/function_call.html.
HERMES: Outputs = [
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
     [("get_weather", PARIS)]),
    ('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>',
     [("get_weather", PARIS)]),
    ('I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
     '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>',
     ["I will look.", ("get_weather", PARIS), ("get_time", ROME)]),
    ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>', [("get_time", "{}")]),
    ('<tool_call>\n{"name": "get_time"}\n</tool_call>', [("get_time", "{}")]),
    ('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
     [("get_weather", PARIS)]),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call> \\"é\\" }{"}}'
     "</tool_call> done",
     [("get_weather", '{"city": "</tool_call> \\"é\\" }{"}'), " done"]),
    ("It is 21 degrees in Paris <tool", ["It is 21 degrees in Paris <tool"]),
    # Broken: cut off, not JSON, an unknown function, arguments that are not an object.
    ('<tool_call>\n{"name": "get_weather", "argu', ['<tool_call>\n{"name": "get_weather", "argu']),
    ("So:\n <tool_call>now", ["So:\n <tool_call>now"]),
    ("<tool_call>\nget_weather(Paris)\n</tool_call>",
     ["<tool_call>\nget_weather(Paris)\n</tool_call>"]),
    ('<tool_call>{"name": "launch", "arguments": {}}</tool_call>',
     ['<tool_call>{"name": "launch", "arguments": {}}</tool_call>']),
    ('<tool_call>{"name": "get_time", "arguments": {"city": Rome}}</tool_call>\n'
     '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>',
     ['<tool_call>{"name": "get_time", "arguments": {"city": Rome}}</tool_call>',
      ("get_time", ROME)]),
    ('<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>',
     ['<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>']),
]  # fmt: skip

# https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/: "JSON based tool calling",
# "Built in Python based tool calling" and "Code Interpreter".
LLAMA_3: Outputs = [
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [("get_weather", PARIS)]),
    ('{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
     [("get_weather", PARIS)]),
    ('\n{"name": "get_weather", "parameters": {"city": "Paris"}}; '
     '{"name": "get_time", "parameters": {"city": "Rome"}}',
     [("get_weather", PARIS), ("get_time", ROME)]),
    ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
     [("get_weather", PARIS)]),
    ('<|python_tag|>brave_search.call(query="current weather in Paris")',
     [("brave_search", '{"query":"current weather in Paris"}')]),
    ("<|python_tag|>import math\nprint(math.pi)",
     [("python", '{"code":"import math\\nprint(math.pi)"}')]),
    ('Let me see.\n<|python_tag|>{"name": "get_time", "parameters": {}}',
     ["Let me see.", ("get_time", "{}")]),
    ("It is sunny; 21 {degrees}.", ["It is sunny; 21 {degrees}."]),
    # Broken, and JSON that is content.
    ('{"name": "get_time", "parameters": {', ['{"name": "get_time", "parameters": {']),
    ('{"name": "Tom", "age": 33}', ['{"name": "Tom", "age": 33}']),
    ('<|python_tag|>{"name": "launch", "parameters": {}}',
     ['<|python_tag|>{"name": "launch", "parameters": {}}']),
    ("<|python_tag|>brave_search.call(query=open('x'))",
     [("python", '{"code":"brave_search.call(query=open(\'x\'))"}')]),
]  # fmt: skip

# https://docs.mistral.ai/capabilities/function_calling and mistral-common's
# `src/mistral_common/tokens/tokenizers/instruct.py` (v3: a list).
MISTRAL: Outputs = [
    ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}]',
     [("get_weather", PARIS)]),
    ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
     '{"name": "get_time", "arguments": {"city": "Rome"}}]',
     [("get_weather", PARIS), ("get_time", ROME)]),
    ('[TOOL_CALLS][{"id": "a", "arguments": {"city": "Paris"}, "name": "get_weather"}]',
     [("get_weather", PARIS)]),
    ('I look.[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', ["I look.", ("get_time", "{}")]),
    ('[TOOL_CALLS] {"name": "get_time", "arguments": {}}', [("get_time", "{}")]),
    ("Tools are [TOOL", ["Tools are [TOOL"]),
    ("[1, 2]", ["[1, 2]"]),
    # Broken: cut off, an empty list, not a list, a list with an unknown function.
    ('[TOOL_CALLS][{"name": "get_weather", ', ['[TOOL_CALLS][{"name": "get_weather", ']),
    ("[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
    ('[TOOL_CALLS][{"name": "get_time", "arguments": {}}, {"name": "launch"}]',
     [("get_time", "{}"), ', {"name": "launch"}]']),
]  # fmt: skip

# The Mistral format from v11 on: `[TOOL_CALLS]name[ARGS]{…}`.
MISTRAL_ARGS: Outputs = [
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [("get_weather", PARIS)]),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"city": "Rome"}',
     [("get_weather", PARIS), ("get_time", ROME)]),
    ('[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{"city": "Paris"}', [("get_weather", PARIS)]),
    ("[TOOL_CALLS]get_time[ARGS]{}", [("get_time", "{}")]),
    ('I look. [TOOL_CALLS]get_time[ARGS] {"city": "Rome"}', ["I look.", ("get_time", ROME)]),
    ('[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', [("get_time", "{}")]),
    # Broken: cut off in the name and in the arguments, not JSON, an unknown function.
    ("[TOOL_CALLS]get_we", ["[TOOL_CALLS]get_we"]),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": ', ['[TOOL_CALLS]get_weather[ARGS]{"city": ']),
    ("[TOOL_CALLS]get_weather[ARGS]Paris", ["[TOOL_CALLS]get_weather[ARGS]Paris"]),
    ("[TOOL_CALLS]launch[ARGS]{}", ["[TOOL_CALLS]launch[ARGS]{}"]),
]  # fmt: skip

# https://cookbook.openai.com/articles/openai-harmony: "Receiving tool calls" and "Channels".
_THOUGHT = "<|channel|>analysis<|message|>They ask for {}.<|end|><|start|>assistant"
_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
HARMONY: Outputs = [
    ("<|channel|>final<|message|>It is sunny.", ["It is sunny."]),
    (_THOUGHT.format("2") + "<|channel|>final<|message|>2", ["(They ask for 2.)", "2"]),
    (_CALL.format("get_weather", PARIS) + "<|call|>", [("get_weather", PARIS)]),
    (_THOUGHT.format("rain") + _CALL.format("get_weather", PARIS),
     ["(They ask for rain.)", ("get_weather", PARIS)]),
    (" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>" + PARIS,
     [("get_weather", PARIS)]),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_time"
     "<|channel|>commentary json<|message|>{}<|call|>", ["(Hm.)", ("get_time", "{}")]),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
     + _CALL.format("get_time", ROME), ["I look.", ("get_time", ROME)]),
    ("It is sunny.", ["It is sunny."]),
    # Broken: cut off, not JSON, an unknown function.
    (_CALL.format("get_weather", '{"city": '), [_CALL.format("get_weather", '{"city": ')]),
    (_CALL.format("get_weather", "Paris"), [_CALL.format("get_weather", "Paris")]),
    (_CALL.format("launch", "{}"), [_CALL.format("launch", "{}")]),
    ("<|channel|>analysis<|message|>Hm", ["(Hm)"]),
]  # fmt: skip

# Bare JSON, as in llama.cpp's `docs/function-calling.md`, from models prompted to write it.
BARE: Outputs = [
    ('{"name": "get_weather", "arguments": {"city": "Paris"}}', [("get_weather", PARIS)]),
    ('[{"name": "get_weather", "arguments": {"city": "Paris"}},\n'
     ' {"name": "get_time", "arguments": {"city": "Rome"}}]',
     [("get_weather", PARIS), ("get_time", ROME)]),
    ('  {"name": "get_weather", "parameters": {"city": "Paris"}}  ', [("get_weather", PARIS)]),
    ('{"name": "get_time", "arguments": {}}\n{"name": "get_time", "arguments": {"city": "Rome"}}',
     [("get_time", "{}"), ("get_time", ROME)]),
    ('{"name": "get_time", "arguments": null} That is it.', [("get_time", "{}"), "That is it."]),
    ('So: {"name": "get_time", "arguments": {}}', ['So: {"name": "get_time", "arguments": {}}']),
    ("", []),
    # Broken, and JSON that is content.
    ('{"name": "get_weather", "arguments": {"city": NaN}}',
     ['{"name": "get_weather", "arguments": {"city": NaN}}']),
    ("{}", ["{}"]),
    ('{"city": "Paris"}', ['{"city": "Paris"}']),
    ('{"name": 5, "arguments": {}}', ['{"name": 5, "arguments": {}}']),
]  # fmt: skip

# https://www.ibm.com/granite/docs (Granite 3.3) and Phi-4-mini's model card: a list after a token.
TOOL_CALL_LIST: Outputs = [
    ('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
     [("get_weather", PARIS)]),
    ('<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
     [("get_weather", PARIS)]),
    ('<|tool_call|> [{"name": "get_time", "arguments": {}}, '
     '{"name": "get_time", "arguments": {"city": "Rome"}}]',
     [("get_time", "{}"), ("get_time", ROME)]),
    ('So: <|tool_call|>[{"name": "get_time"}]', ["So:", ("get_time", "{}")]),
    ("No tool is needed.", ["No tool is needed."]),
    ("<|tool_call|>[]", ["<|tool_call|>[]"]),
    ('<|tool_call|>[{"name": "get_time"', ['<|tool_call|>[{"name": "get_time"']),
    ('<|tool_call|>[{"name": "launch"}]', ['<|tool_call|>[{"name": "launch"}]']),
]  # fmt: skip

# https://docs.cohere.com/docs/tool-use, and Command R7B's template: `tool_name` and `parameters`.
COMMAND_R7B: Outputs = [
    ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
     '{"city": "Paris"}}\n]<|END_ACTION|>', [("get_weather", PARIS)]),
    ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
     '{"city": "Paris"}}, {"tool_call_id": "1", "tool_name": "get_time", "parameters": '
     '{"city": "Rome"}}]<|END_ACTION|>', [("get_weather", PARIS), ("get_time", ROME)]),
    ('<|START_ACTION|>[{"tool_name": "get_time", "parameters": {}}]', [("get_time", "{}")]),
    ("Hello.", ["Hello."]),
    ('I look. <|START_ACTION|>[{"tool_name": "get_time"}]<|END_ACTION|>\n',
     ["I look.", ("get_time", "{}")]),
    ("<|START_ACTION|>[", ["<|START_ACTION|>["]),
    ('<|START_ACTION|>[{"name": "get_time", "parameters": {}}]',
     ['<|START_ACTION|>[{"name": "get_time", "parameters": {}}]']),
    ("<|START_ACTION|>[]<|END_ACTION|>", ["<|START_ACTION|>[]<|END_ACTION|>"]),
]  # fmt: skip

# https://huggingface.co/moonshotai/Kimi-K2-Instruct, `docs/tool_call_guidance.md`, and the tests of
# llama.cpp's parser (`tests/test-chat.cpp`).
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}"
_KIMI_END = "<|tool_call_end|>"
_KIMI_ODD = '{"city": "<|tool_call_end|> \\\\ \\"é\\" }{\\n", "at": {"x": [1, {}]}}'
_KIMI_PARIS = _KIMI.format("get_weather:0", PARIS)
KIMI_K2: Outputs = [
    (f"{_SECTION}{_KIMI_PARIS}{_KIMI_END}{_SECTION_END}", [("get_weather", PARIS)]),
    (f"I look.\n{_SECTION}{_KIMI_PARIS}{_KIMI_END}"
     f"{_KIMI.format('get_time:1', ROME)}{_KIMI_END}{_SECTION_END}",
     ["I look.", ("get_weather", PARIS), ("get_time", ROME)]),
    (f"{_SECTION}{_KIMI.format('get_time:12', '{}')}{_KIMI_END}{_SECTION_END} done",
     [("get_time", "{}"), " done"]),
    (f"{_SECTION}\n<|tool_call_begin|> get_time:0 <|tool_call_argument_begin|> {{}} {_KIMI_END}\n"
     f"{_SECTION_END}", [("get_time", "{}")]),
    (f"{_SECTION}{_KIMI.format('get_time', '{}')}{_KIMI_END}{_SECTION_END}", [("get_time", "{}")]),
    (f"{_SECTION}{_KIMI.format('get_weather:0', _KIMI_ODD)}{_KIMI_END}{_SECTION_END}",
     [("get_weather", _KIMI_ODD)]),
    ("It is 21 degrees <|tool_calls_sec", ["It is 21 degrees <|tool_calls_sec"]),
    # Without the last markers, which the end of the turn implies.
    (f"{_SECTION}{_KIMI_PARIS}{_KIMI_END}", [("get_weather", PARIS)]),
    (f"{_SECTION}{_KIMI_PARIS}", [("get_weather", PARIS)]),
    (f"{_SECTION}{_KIMI_PARIS}{_SECTION_END}", [("get_weather", PARIS)]),
    # Broken: cut off in the id and the arguments; an empty section; no JSON;
    # an unknown function; a list.
    (f"{_SECTION}<|tool_call_begin|>functions.get_we",
     [f"{_SECTION}<|tool_call_begin|>functions.get_we"]),
    (f"{_SECTION}{_KIMI_PARIS[:-2]}", [f"{_SECTION}{_KIMI_PARIS[:-2]}"]),
    # After a complete call: a part of a marker, and a second call that is cut off or unknown.
    (f"{_SECTION}{_KIMI_PARIS}<|tool", [("get_weather", PARIS)]),
    (f"{_SECTION}{_KIMI_PARIS}{_KIMI_END}{_KIMI.format('get_time:1', ROME)[:-2]}",
     [("get_weather", PARIS), _KIMI.format("get_time:1", ROME)[:-2]]),
    (f"{_SECTION}{_KIMI_PARIS}{_KIMI_END}{_KIMI.format('launch:1', '{}')}{_KIMI_END}",
     [("get_weather", PARIS), _KIMI.format("launch:1", "{}") + _KIMI_END]),
    (f"{_SECTION}{_SECTION_END}", [f"{_SECTION}{_SECTION_END}"]),
    (f"{_SECTION}{_KIMI.format('get_time:0', 'now')}",
     [f"{_SECTION}{_KIMI.format('get_time:0', 'now')}"]),
    (f"{_SECTION}{_KIMI.format('launch:0', '{}')}",
     [f"{_SECTION}{_KIMI.format('launch:0', '{}')}"]),
    (f"{_SECTION}{_KIMI.format('get_time:0', '[1]')}",
     [f"{_SECTION}{_KIMI.format('get_time:0', '[1]')}"]),
]  # fmt: skip

# https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, and llama.cpp's tests.
_GEMMA = "<|tool_call>call:{}<tool_call|>"
_GEMMA_PARIS = _GEMMA.format('get_weather{city:<|"|>Paris<|"|>}')
_GEMMA_ODD = 'get_weather{at:{k:[<|"|>a,b]}<|"|>,{}],n:-1.5e3,x:null},city:<|"|>"é" \\ <|"\n<<|"|>}'
GEMMA_4: Outputs = [
    (_GEMMA_PARIS, [("get_weather", '{"city":"Paris"}')]),
    ("I look.\n" + _GEMMA_PARIS + _GEMMA.format('get_time{city:<|"|>Rome<|"|>}'),
     ["I look.", ("get_weather", '{"city":"Paris"}'), ("get_time", '{"city":"Rome"}')]),
    (_GEMMA.format("get_time{}") + " done", [("get_time", "{}"), " done"]),
    (_GEMMA.format("get_weather{days: 2, ok:true , no:false,at:[]}"),
     [("get_weather", '{"days":2,"ok":true,"no":false,"at":[]}')]),
    (_GEMMA.format(_GEMMA_ODD),
     [("get_weather", '{"at":{"k":["a,b]}",{}],"n":-1.5e3,"x":null},'
       '"city":"\\"é\\" \\\\ <|\\"\\u000a<"}')]),
    (_GEMMA.format('get_time{<|"|>a b<|"|>:[1,2]}'), [("get_time", '{"a b":[1,2]}')]),
    (_GEMMA_PARIS.removesuffix("<tool_call|>"), [("get_weather", '{"city":"Paris"}')]),
    ("It is 21 degrees <|tool", ["It is 21 degrees <|tool"]),
    # Several calls between two markers, as mlx-lm also reads them.
    (_GEMMA.format("get_time{} call:get_weather{days:2}") + " done",
     [("get_time", "{}"), ("get_weather", '{"days":2}'), " done"]),
    ("<|tool_call>call:get_time{} ca", [("get_time", "{}"), " ca"]),
    ("<|tool_call>call:get_time{}call:launch{}", [("get_time", "{}"), "call:launch{}"]),
    # Broken: cut off in the name, a key and a string; no name; a word; an unknown function; a
    # wrong end of a list; a missing value.
    ("<|tool_call>call:get_we", ["<|tool_call>call:get_we"]),
    ("<|tool_call>call:get_time{ci", ["<|tool_call>call:get_time{ci"]),
    ('<|tool_call>call:get_time{city:<|"|>Ro<|', ['<|tool_call>call:get_time{city:<|"|>Ro<|']),
    ("<|tool_call>get_time{}", ["<|tool_call>get_time{}"]),
    ("<|tool_call>call:get_time{city:Rome}", ["<|tool_call>call:get_time{city:Rome}"]),
    ("<|tool_call>call:launch{}", ["<|tool_call>call:launch{}"]),
    ("<|tool_call>call:get_time{a:[1}", ["<|tool_call>call:get_time{a:[1}"]),
    ("<|tool_call>call:get_time{a:,b:1}", ["<|tool_call>call:get_time{a:,b:1}"]),
]  # fmt: skip

# https://docs.liquid.ai/lfm/key-concepts/tool-use, and llama.cpp's tests.
_LFM = "<|tool_call_start|>[{}]<|tool_call_end|>"
_LFM_ODD = (
    "get_weather(city='L\\'\"é\\\\\\n\\d\\x41\\u00e9\\ud83d\\ude00]', "
    "at={\"x\": [1, -2.5e3, {}], 'y': None}, ok=True, no=false)"
)
LFM_2: Outputs = [
    (_LFM.format('get_weather(city="Paris")'), [("get_weather", '{"city":"Paris"}')]),
    ("I look.\n" + _LFM.format('get_weather(city="Paris"), get_time(city="Rome")'),
     ["I look.", ("get_weather", '{"city":"Paris"}'), ("get_time", '{"city":"Rome"}')]),
    (_LFM.format("get_time()") + "Checking the time.", [("get_time", "{}"), "Checking the time."]),
    (_LFM.format("get_weather( city = 'Paris',days=2 )"),
     [("get_weather", '{"city":"Paris","days":2}')]),
    (_LFM.format(_LFM_ODD),
     [("get_weather", '{"city":"L\'\\"é\\\\\\n\\\\d\\u0041\\u00e9\\ud83d\\ude00]",'
       '"at":{"x":[1,-2.5e3,{}],"y":null},"ok":true,"no":false}')]),
    (_LFM.format("get_weather(city='a\nb\tc')"), [("get_weather", '{"city":"a\\u000ab\\u0009c"}')]),
    ("<|tool_call_start|>[get_time()]", [("get_time", "{}")]),
    (_LFM.format("get_time(a=[1,], b={'c': 2 , },), get_time(),"),
     [("get_time", '{"a":[1],"b":{"c":2}}'), ("get_time", "{}")]),
    # The page's "Output function calls as JSON".
    (_LFM.format('{"name": "get_weather", "arguments": {"city": "Paris"}}'),
     [("get_weather", PARIS)]),
    (_LFM.format(' {"name": "get_weather", "arguments": {"city": "Paris"}}, '
                 '{"name": "get_time", "arguments": {}}, get_time() '),
     [("get_weather", PARIS), ("get_time", "{}"), ("get_time", "{}")]),
    (_LFM.format("get_time(a=('p', \"q\"), b=(1,), c=(), d=('p'), e=((1), ((2,), [(3)])))"),
     [("get_time", '{"a":["p","q"],"b":[1],"c":[],"d":"p","e":[1,[[2],[3]]]}')]),
    (_LFM.format("get_time(a=1_000, b=.5, c=5., d=+5, e=0x1F, f=-1_0.5e1_0)"),
     [("get_time", '{"a":1000,"b":0.5,"c":5.0,"d":5,"e":31,"f":-105000000000.0}')]),
    (_LFM.format("get_time(a='\\101\\0a\\1234\\N{EURO SIGN}\\N\\N')"),
     [("get_time", '{"a":"\\u0041\\u0000a\\u00534€\\\\N\\\\N"}')]),
    ("A list: [get_time()] <|tool_call", ["A list: [get_time()] <|tool_call"]),
    # Broken: cut off in a name and a string, or after a call; positional arguments; no value;
    # an unknown function; repeated commas and names; an empty list; wrong digits and numbers; an
    # unknown character; tuples without a value or an end.
    ("<|tool_call_start|>[get_we", ["<|tool_call_start|>[get_we"]),
    ('<|tool_call_start|>[get_time(city="Ro', ['<|tool_call_start|>[get_time(city="Ro']),
    ("<|tool_call_start|>[get_time()", [("get_time", "{}")]),
    (_LFM.format("get_time(), launch()") + " No",
     [("get_time", "{}"), ", launch()]<|tool_call_end|> No"]),
    ('<|tool_call_start|>[get_time(), get_weather(city="Ro',
     [("get_time", "{}"), ', get_weather(city="Ro']),
    ('<|tool_call_start|>[get_time("Rome")]', ['<|tool_call_start|>[get_time("Rome")]']),
    ("<|tool_call_start|>[get_time(city=)]", ["<|tool_call_start|>[get_time(city=)]"]),
    ("<|tool_call_start|>[launch()]", ["<|tool_call_start|>[launch()]"]),
    ("<|tool_call_start|>[get_time(a=1,,)]", ["<|tool_call_start|>[get_time(a=1,,)]"]),
    ("<|tool_call_start|>[get_time(,)]", ["<|tool_call_start|>[get_time(,)]"]),
    ("<|tool_call_start|>[get_time(a=[,])]", ["<|tool_call_start|>[get_time(a=[,])]"]),
    ("<|tool_call_start|>[get_time(),,]", [("get_time", "{}"), ",,]"]),
    ("<|tool_call_start|>[get_time(a=1, a=2)]", ["<|tool_call_start|>[get_time(a=1, a=2)]"]),
    ("<|tool_call_start|>[]", ["<|tool_call_start|>[]"]),
    ("<|tool_call_start|>[get_time(a='\\xzz')]", ["<|tool_call_start|>[get_time(a='\\xzz')]"]),
    *((f"<|tool_call_start|>[get_time(a={one})]", [f"<|tool_call_start|>[get_time(a={one})]"])
      for one in ("1__0", "012", "1e999", "1j", "...", "5--5", "'\\N{NO SUCH}'", "(,)", "(1]")),
    ('<|tool_call_start|>[{"name": "launch"}]', ['<|tool_call_start|>[{"name": "launch"}]']),
    ('<|tool_call_start|>{"name": "get_time"}', ['<|tool_call_start|>{"name": "get_time"}']),
]  # fmt: skip

# https://github.com/MeetKai/functionary, the template of v3.1: "Function calls MUST follow the
# specified format".
_F31 = "<function={}>{}</function>"
FUNCTIONARY_3_1: Outputs = [
    (_F31.format("get_weather", PARIS), [("get_weather", PARIS)]),
    ("I look.\n" + _F31.format("get_weather", PARIS) + _F31.format("get_time", ROME),
     ["I look.", ("get_weather", PARIS), ("get_time", ROME)]),
    (_F31.format("get_time", "{}") + " done", [("get_time", "{}"), " done"]),
    (_F31.format("get_weather", _KIMI_ODD), [("get_weather", _KIMI_ODD)]),
    ("<function=get_time> {} ", [("get_time", "{}")]),
    ("<|python_tag|>import math\nprint(math.pi > 3)",
     [("python", '{"code":"import math\\nprint(math.pi > 3)"}')]),
    ('I count.<|python_tag|>{"code": "1 + 1"}', ["I count.", ("python", '{"code": "1 + 1"}')]),
    ("It is 21 degrees <func", ["It is 21 degrees <func"]),
    # Broken: cut off in the name and the arguments, no JSON, an unknown function, a list, no code.
    ("<function=get_we", ["<function=get_we"]),
    ('<function=get_weather>{"city": "Par', ['<function=get_weather>{"city": "Par']),
    (_F31.format("get_weather", "Paris"), [_F31.format("get_weather", "Paris")]),
    (_F31.format("launch", "{}"), [_F31.format("launch", "{}")]),
    (_F31.format("get_time", "[1]"), [_F31.format("get_time", "[1]")]),
    ("<|python_tag|>", ["<|python_tag|>"]),
]  # fmt: skip

# The same, v3.2: "Respond in this format: >>>${recipient}"; the prompt has the first `>>>`.
FUNCTIONARY_3_2: Outputs = [
    (f"get_weather\n{PARIS}", [("get_weather", PARIS)]),
    (f"get_weather\n{PARIS}>>>get_time\n{ROME}", [("get_weather", PARIS), ("get_time", ROME)]),
    (f"all\nI look.\n>>>get_weather\n{PARIS}", ["I look.", ("get_weather", PARIS)]),
    ("all\nIt is > 21 >> 3 >>> 5\n>>> x", ["It is > 21 >> 3 >>> 5\n>>> x"]),
    (f"get_time\n{{}}\n>>>get_weather\n{_KIMI_ODD}",
     [("get_time", "{}"), ("get_weather", _KIMI_ODD)]),
    ("python\nimport math\nprint('é')",
     [("python", '{"code":"import math\\nprint(\'é\')"}')]),
    ("get_time\n{}>>>all\nDone.", [("get_time", "{}"), "Done."]),
    ("It is sunny.", ["It is sunny."]),
    ("", []),
    # Broken: cut off in the name and the arguments, no JSON, an unknown function, a list.
    ("get_we", ["get_we"]),
    ('get_weather\n{"city": "Par', ['get_weather\n{"city": "Par']),
    ("get_weather\nParis", ["get_weather\nParis"]),
    ("launch\n{}", ["launch\n{}"]),
    ("get_time\n[1]", ["get_time\n[1]"]),
]  # fmt: skip

OUTPUTS: Mapping[str, Outputs] = {
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "xml": XML,
    "glm": GLM,
    "minimax": MINIMAX,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "deepseek-v4": DEEPSEEK_V4,
    "hermes": HERMES,
    "llama3": LLAMA_3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "harmony": HARMONY,
    "bare": BARE,
    "tool-call-list": TOOL_CALL_LIST,
    "command-r7b": COMMAND_R7B,
    "functionary-v3.1": FUNCTIONARY_3_1,
    "functionary-v3.2": FUNCTIONARY_3_2,
    "gemma4": GEMMA_4,
    "lfm2": LFM_2,
    "kimi-k2": KIMI_K2,
    "kimi-k2-first": KIMI_K2,
}
