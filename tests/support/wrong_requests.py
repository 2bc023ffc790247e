"""Requests with one error each, and the contract's error objects for them."""

from __future__ import annotations

from typing import Any

C = "/v1/completions"
H = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
ASKED = USER[0]
TOOL = {"type": "function", "function": {"name": "f"}}
RICH = {"properties": {f"p{i}": {"enum": [f"{i}" * 20, "b"]} for i in range(160)}}
MANY = [
    {"type": "function", "function": {"name": f"g{i}", "parameters": RICH, "strict": True}}
    for i in range(127)
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BASE: dict[str, dict[str, Any]] = {
    C: {"model": "demo", "prompt": "Hi"},
    H: {"model": "demo", "messages": USER},
}
DROP = object()


def body_of(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a valid body with some fields changed or left out."""
    merged = {**BASE[path], **changes}
    return {name: value for name, value in merged.items() if value is not DROP}


# Path, changes, param, code, the exact message (or its beginning, with …).
CASES: list[tuple[str, dict[str, Any], str | None, str | None, str]] = [
    (C, {"model": DROP}, None, None, "you must provide a model parameter"),
    (H, {"model": DROP}, None, None, "you must provide a model parameter"),
    (C, {"model": 5}, "model", "invalid_type",
     "Invalid type for 'model': expected a string, but got an integer instead."),
    (H, {"messages": DROP}, "messages", "missing_required_parameter",
     "Missing required parameter: 'messages'."),
    (H, {"messages": []}, "messages", "empty_array",
     "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty "
     "array instead."),
    (H, {"messages": "Hi"}, "messages", "invalid_type",
     "Invalid type for 'messages': expected an array, but got a string instead."),
    (H, {"messages": ["Hi"]}, "messages[0]", "invalid_type",
     "Invalid type for 'messages[0]': expected an object, but got a string instead."),
    (H, {"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter",
     "Missing required parameter: 'messages[0].role'."),
    (H, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter",
     "Missing required parameter: 'messages[0].content'."),
    (H, {"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "invalid_value",
     "Invalid value: 'robot'. Supported values are: 'system', 'developer', 'user', 'assistant', "
     "'tool', and 'function'."),
    (H, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type",
     "Invalid type for 'messages[0].content': expected one of a string or array of objects, but "
     "got an integer instead."),
    (H, {"messages": [*USER, {"role": "user", "content": [{"type": "video"}]}]},
     "messages[1].content[0].type", "invalid_value", "Invalid value: 'video'. Supported values…"),
    (H, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "missing_required_parameter", "Missing required parameter…"),
    (H, {"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].tool_calls",
     "empty_array", "Invalid 'messages[0].tool_calls': empty array…"),
    (H, {"messages": [{"role": "user", "content": None}]}, "messages.[0].content", None,
     "Invalid value for 'content': expected a string, got null."),
    (H, {"messages": [*USER, {"role": "assistant", "content": None}]}, "messages.[1].content",
     None, "Invalid value for 'content': expected a string, got null."),
    (H, {"messages": [*USER, {**CALLED, "tool_calls": [{"type": "function", "function":
                                                        CALL["function"]}]}]},
     "messages[1].tool_calls[0].id", "missing_required_parameter",
     "Missing required parameter: 'messages[1].tool_calls[0].id'."),
    (H, {"messages": [{"role": None, "content": "Hi"}]}, "messages[0].role", "invalid_type",
     "Invalid type for 'messages[0].role': expected a string, but got null instead."),
    (H, {"messages": [{"role": "assistant"}]}, "messages[0].content",
     "missing_required_parameter", "Missing required parameter: 'messages[0].content'."),
    (C, {"prompt": 5}, "prompt", "invalid_type", "Invalid type for 'prompt'…"),
    (C, {"prompt": []}, "prompt", "empty_array", "Invalid 'prompt': empty array…"),
    (C, {"prompt": ["a", 1]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": ["a", [1]]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": [[1], []]}, "prompt[1]", "empty_array", "Invalid 'prompt[1]': empty array…"),
    (C, {"prompt": [1, 1.5]}, "prompt[1]", "invalid_type", "Invalid type for 'prompt[1]'…"),
    (C, {"prompt": [True]}, "prompt[0]", "invalid_type", "Invalid type for 'prompt[0]'…"),
    (C, {"prompt": [1, -1]}, "prompt[1]", "integer_below_min_value",
     "Invalid 'prompt[1]': integer below minimum value. Expected a value >= 0, but got -1 "
     "instead."),
    (C, {"prompt": [99999]}, "prompt", "invalid_value", "Invalid 'prompt': 99999 is not a token…"),
    (C, {"max_tokens": "five"}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a string instead."),
    (C, {"max_tokens": "5"}, "max_tokens", "invalid_type", "Invalid type for 'max_tokens'…"),
    (C, {"max_tokens": 5.5}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a decimal number instead."),
    (C, {"max_tokens": True}, "max_tokens", "invalid_type",
     "Invalid type for 'max_tokens': expected an integer, but got a boolean instead."),
    (C, {"max_tokens": -15335}, "max_tokens", "integer_below_min_value",
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 0, but got -15335 "
     "instead."),
    (H, {"max_tokens": 0}, "max_tokens", "integer_below_min_value",
     "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0 "
     "instead."),
    (H, {"max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value",
     "Invalid 'max_completion_tokens': integer below minimum value…"),
    (H, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value",
     "Invalid 'max_tokens': 5 differs from 'max_completion_tokens', 6…"),
    (C, {"temperature": 3}, "temperature", "decimal_above_max_value",
     "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 "
     "instead."),
    (C, {"temperature": -1}, "temperature", "decimal_below_min_value",
     "Invalid 'temperature': decimal below minimum value. Expected a value >= 0, but got -1 "
     "instead."),
    (H, {"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value", "Invalid 'fre…"),
    (H, {"min_p": 2}, "min_p", "decimal_above_max_value", "Invalid 'min_p': decimal above…"),
    (C, {"temperature": 2.5}, "temperature", "decimal_above_max_value",
     "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 "
     "instead."),
    (C, {"temperature": -0.5}, "temperature", "decimal_below_min_value",
     "Invalid 'temperature': decimal below minimum value. Expected a value >= 0, but got -0.5 "
     "instead."),
    (C, {"temperature": "hot"}, "temperature", "invalid_type",
     "Invalid type for 'temperature': expected a decimal number, but got a string instead."),
    (C, {"top_p": 1.5}, "top_p", "decimal_above_max_value", "Invalid 'top_p': decimal above…"),
    (C, {"presence_penalty": 2.5}, "presence_penalty", "decimal_above_max_value", "Invalid…"),
    (C, {"frequency_penalty": -2.5}, "frequency_penalty", "decimal_below_min_value", "Invalid…"),
    (C, {"n": 0}, "n", "integer_below_min_value", "Invalid 'n': integer below minimum value…"),
    (C, {"n": 129}, "n", "integer_above_max_value", "Invalid 'n': integer above maximum value…"),
    (C, {"logprobs": 6}, "logprobs", "integer_above_max_value", "Invalid 'logprobs'…"),
    (C, {"logprobs": True}, "logprobs", "invalid_type",
     "Invalid type for 'logprobs': expected an integer, but got a boolean instead."),
    (H, {"logprobs": 1}, "logprobs", "invalid_type",
     "Invalid type for 'logprobs': expected a boolean, but got an integer instead."),
    (H, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value",
     "Invalid 'top_logprobs'…"),
    (H, {"top_logprobs": 3}, "top_logprobs", None,
     "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."),
    (C, {"best_of": 21}, "best_of", "integer_above_max_value", "Invalid 'best_of'…"),
    (C, {"n": 5, "best_of": 4}, "best_of", None,
     "You requested that the server return more choices than it will generate (HINT: you must set "
     "'n' (currently 5) to be at most 'best_of' (currently 4), or omit either parameter if you "
     "don't specifically want to use them.)"),
    (C, {"best_of": 3, "stream": True}, "best_of", None, "Results cannot be streamed…"),
    (C, {"suffix": "x", "echo": True, "logprobs": 1}, "suffix", "invalid_value",
     "Invalid 'suffix': not supported together…"),
    (C, {"logit_bias_vocabulary": "latin", "logit_bias": {"1": 1}}, "logit_bias_vocabulary",
     "invalid_value", "Invalid value: 'latin'. Supported values are: …"),
    (C, {"stop": list("abcde")}, "stop", "array_above_max_length",
     "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an array "
     "with length 5 instead."),
    (C, {"stop": 5}, "stop", "invalid_type",
     "Invalid type for 'stop': expected one of a string or array of strings, but got an integer "
     "instead."),
    (C, {"stop": ["a", 5]}, "stop[1]", "invalid_type",
     "Invalid type for 'stop[1]': expected a string, but got an integer instead."),
    (C, {"seed": 2**63}, "seed", "integer_above_max_value", "Invalid 'seed'…"),
    (C, {"seed": 1.5}, "seed", "invalid_type", "Invalid type for 'seed'…"),
    (C, {"stream": "yes"}, "stream", "invalid_type",
     "Invalid type for 'stream': expected a boolean, but got a string instead."),
    (C, {"stream_options": {"include_usage": True}}, "stream_options", None,
     "The 'stream_options' parameter is only allowed when 'stream' is enabled."),
    (H, {"stream_options": {}}, "stream_options", None,
     "The 'stream_options' parameter is only allowed when 'stream' is enabled."),
    (H, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage",
     "invalid_type", "Invalid type for 'stream_options.include_usage': expected a boolean…"),
    (C, {"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", "Invalid key in 'logit_bias': x…"),
    (C, {"logit_bias": {"5": 101}}, "logit_bias.5", "decimal_above_max_value",
     "Invalid 'logit_bias.5': decimal above maximum value. Expected a value <= 100, but got 101 "
     "instead."),
    (C, {"logit_bias": {"5": "a"}}, "logit_bias.5", "invalid_type", "Invalid type for 'logit_b…"),
    (C, {"logit_bias": [5]}, "logit_bias", "invalid_type",
     "Invalid type for 'logit_bias': expected an object, but got an array instead."),
    (C, {"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value", "Invalid 'logit_bias': 999…"),
    (C, {"suffix": "x"}, "suffix", "unsupported_parameter", "Unsupported parameter: 'suffix'…"),
    (C, {"grammar": "root ::= ["}, "grammar", "invalid_value", "Invalid 'grammar'…"),
    (C, {"grammar": 'root ::= "a"', "lark": "x"}, "lark", "invalid_value", "Invalid 'lark'…"),
    (C, {"regex": "("}, "regex", "invalid_value", "Invalid 'regex'…"),
    (C, {"regex": 5}, "regex", "invalid_type", "Invalid type for 'regex'…"),
    (C, {"lark": "start: a"}, "lark", "invalid_value", "Invalid 'lark'…"),
    (C, {"json_schema": {"type": 5}}, "json_schema", None, "Invalid schema: In context=('type',…"),
    (C, {"json_schema": "{}"}, "json_schema", "invalid_type", "Invalid type for 'json_schema'…"),
    (C, {"oai_compat": False}, "oai_compat", "unsupported_parameter", "Unsupported parameter…"),
    (H, {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
     "tools[0].custom.format.grammar", "missing_required_parameter",
     "Missing required parameter: 'tools[0].custom.format.grammar'."),
    (H, {"tools": [{"type": "custom", "custom": {"name": "f", "format": {
        "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: ("}}}}]},
     "tools[0].custom.format.grammar.definition", "invalid_value",
     "Invalid 'tools[0].custom.format.grammar.definition': line 1: unexpected…"),
    (H, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice", None, "Invalid value for 'tool_choice': 'g' is not one of the tools of…"),
    (H, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
     "tool_choice.function", "missing_required_parameter",
     "Missing required parameter: 'tool_choice.function'."),
    (H, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools":
                                          {"mode": "none", "tools": [TOOL]}}},
     "tool_choice.allowed_tools.mode", "invalid_value",
     "Invalid value: 'none'. Supported values are: 'auto' and 'required'."),
    (H, {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters":
                                                           {"type": "thing"}}}]},
     "tools[1].function.parameters", None,
     "Invalid schema for function 'g': In context=('type',), 'thing' is not valid under any…"),
    (H, {"tools": [{"type": "function", "function": {
        "name": "f", "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}}}]},
     "tools[0].function.parameters.properties.a.not", None,
     "Invalid schema for function 'f': In context=('properties', 'a', 'not'), 'not' is not…"),
    (H, {"tools": MANY, "tool_choice": "required"}, "tools", "array_above_max_length",
     "Invalid 'tools': the grammar for these functions is too large…"),
    (H, {"tools": [TOOL], "regex": "a"}, "regex", "invalid_value",
     "Invalid 'regex': not supported together with tools…"),
    (H, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name",
     "invalid_value", "Invalid 'tools[0].function.name': string does not match pattern…"),
    (H, {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools",
     "array_above_max_length", "Invalid 'tools': array too long. Expected an array with maximum…"),
    (H, {"tool_choice": "auto"}, "tool_choice", None,
     "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified."),
    (H, {"tool_choice": "some"}, "tool_choice", "invalid_value", "Invalid value: 'some'…"),
    (H, {"parallel_tool_calls": False}, "parallel_tool_calls", None, "Invalid value for 'parall…"),
    (H, {"function_call": "auto"}, "function_call", None, "Invalid value for 'function_call'…"),
    (H, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", None,
     "Invalid value for 'function_call': 'g' is not one of the functions of the request…"),
    (H, {"functions": [{"name": "f", "parameters": {"type": 5}}]}, "functions[0].parameters", None,
     "Invalid schema for function 'f'…"),
    (H, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format",
     "invalid_value", "Invalid 'response_format': only one grammar is allowed, and 'regex' is…"),
    (H, {"response_format": {"type": "json_schema", "json_schema":
                             {"name": "n", "schema": {"type": "x"}}}}, "response_format", None,
     "Invalid schema for response_format 'n': In context=('type',), 'x' is not valid under any…"),
    (H, {"response_format": "json_object"}, "response_format", "invalid_type",
     "Invalid type for 'response_format': expected an object, but got a string instead."),
    (H, {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value",
     "Invalid value: 'xml'. Supported values are: 'text', 'json_object', and 'json_schema'."),
    (H, {"response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "missing_required_parameter", "Missing required parameter: 'response_format.json_schema'."),
    (H, {"store": True}, "store", "unsupported_parameter", "Unsupported parameter: 'store'…"),
    (H, {"metadata": {"a": "b"}}, "metadata", None,
     "The 'metadata' parameter is only allowed when 'store' is enabled."),
    (H, {"metadata": {"k" * 65: "v"}}, "metadata", "property_name_above_max_length",
     "Invalid 'metadata': property name too long. Expected a property name with maximum length 64, "
     "but got a property name with length 65 instead."),
    (H, {"prompt_cache_options": {"ttl": "12h"}}, "prompt_cache_options.ttl", "invalid_value",
     "Invalid value: '12h'. Supported values are: '30m'."),
    (H, {"moderation": {"model": "m"}}, "moderation", "unsupported_parameter",
     "Unsupported parameter: 'moderation' is not supported by…"),
    (H, {"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length",
     "Invalid 'metadata.k': string too long. Expected a string with maximum length 512, but got a "
     "string with length 513 instead."),
    (H, {"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, None,
     "unsupported_parameter", "Unsupported parameter…"),
    (H, {"modalities": ["text", "audio"]}, "audio", "missing_required_parameter", "Missing…"),
    (H, {"modalities": ["smell"]}, "modalities[0]", "invalid_value",
     "Invalid value: 'smell'. Supported values are: 'text' and 'audio'."),
    (H, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter", "Unsupported…"),
    (H, {"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value", "Invalid value: 'hug…"),
    (H, {"web_search_options": {}}, "web_search_options", "unsupported_parameter", "Unsupport…"),
    (H, {"service_tier": "gold"}, "service_tier", "invalid_value", "Invalid value: 'gold'…"),
    (H, {"verbosity": "loud"}, "verbosity", "invalid_value", "Invalid value: 'loud'…"),
    (H, {"prediction": {"type": "content"}}, "prediction.content", "missing_required_parameter",
     "Missing required parameter: 'prediction.content'."),
    (H, {"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length", "Inva…"),
    (H, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
     "messages.[0].role", None, "Invalid parameter: messages with role 'tool' must be a response…"),
    (H, {"messages": [ASKED, CALLED]}, "messages.[2].role", None,
     "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
     "'tool_call_id'. The following tool_call_ids did not have response messages: call_1"),
    (H, {"messages": [ASKED, CALLED, ASKED]}, "messages.[2].role", None,
     "An assistant message with 'tool_calls' must be followed by tool messages responding to…"),
    (H, {"messages": [ASKED, CALLED, {"role": "tool", "content": "x", "tool_call_id": "c"}]},
     "messages.[2].role", None, "Invalid parameter: messages with role 'tool' must be a…"),
    (H, {"messages": [ASKED, {**CALLED, "tool_calls": []}]}, "messages[1].tool_calls",
     "empty_array", "Invalid 'messages[1].tool_calls': empty array…"),
    (H, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages[0].content[0].type",
     "unsupported_parameter", "Unsupported parameter: 'messages[0].content[0].type'…"),
    (C, {"top_k": 2**31}, "top_k", "integer_above_max_value", "Invalid 'top_k'…"),
    (C, {"prompt": "word " * 5000}, "prompt", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens, however you requested…"),
    (C, {"max_tokens": 5000}, "prompt", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens, however you requested 5001 tokens (1 in "
     "your prompt; 5000 for the completion). Please reduce your prompt; or completion length."),
    (H, {"messages": [{"role": "user", "content": "word " * 5000}]}, "messages",
     "context_length_exceeded", "This model's maximum context length is 2048 tokens. However…"),
    (H, {"max_tokens": 5000}, "messages", "context_length_exceeded",
     "This model's maximum context length is 2048 tokens. However, you requested 50…"),
]  # fmt: skip
