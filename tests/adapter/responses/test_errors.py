"""Tests of the errors of malformed Responses requests: message, parameter and code."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.errors import (
    InvalidRequest,
    UnknownModel,
    in_responses,
    render,
)
from latimer.backends.errors import ContextExceeded

from .requests import call, output, read, user

MISSING = "missing_required_parameter"
WRONG = "invalid_value"
TYPE = "invalid_type"
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
TOOL = {"type": "function", "name": "f"}
HOSTED = {"type": "web_search_preview"}
SPACE = {"type": "namespace", "name": "n", "tools": [TOOL]}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}
# The types of tools that OpenAI runs.
RUN = (
    "'apply_patch', 'code_interpreter', 'computer', 'computer_use_preview', 'file_search', "
    "'image_generation', 'local_shell', 'mcp', 'programmatic_tool_calling', 'shell', "
    "'tool_search', 'web_search', and 'web_search_preview'."
)
NESTED = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
NONE = (
    "One of \"input\" or \"previous_response_id\" or 'prompt' or 'conversation' must be provided."
)
USER = "'input_text', 'input_image', 'input_file', 'scoped_content', and 'input_audio'."
PARTS = (
    "'input_text', 'input_image', 'input_audio', 'output_text', 'refusal', 'input_file', "
    "'computer_screenshot', 'summary_text', and 'encrypted_content'."
)
FILES = {"type": "input_file", "filename": "a.pdf"}
# The beginning of a PDF file behind another type, in an encoding that no client uses.
HIDDEN_PDF = "data:text/plain,%25%50DF-"


def moved(name: str, to: str) -> str:
    """Return OpenAI's message for a field that has moved."""
    return (
        f"Unsupported parameter: '{name}'. In the Responses API, this parameter has moved to "
        f"'{to}'. Try again with the new parameter."
    )


def wrong(value: str, listed: str) -> str:
    """Return OpenAI's message for a word that is not one of several."""
    return f"Invalid value: '{value}'. Supported values are: {listed}"


def of_type(param: str, expected: str, found: str) -> str:
    """Return OpenAI's message for a wrong type."""
    return f"Invalid type for '{param}': expected {expected}, but got {found} instead."


CASES: list[tuple[dict[str, Any], str, str | None, str | None]] = [
    ({"model": None}, of_type("model", "a string", "an object"), "model", TYPE),
    ({"input": 5}, of_type("input", "one of a string or array of input items", "an integer"),
     "input", TYPE),
    ({"input": None}, of_type("input", "one of a string or array of input items", "an object"),
     "input", TYPE),
    ({"input": ""}, NONE, None, MISSING),
    ({"input": []}, NONE, None, MISSING),
    ({"messages": []}, moved("messages", "input"), None, "unsupported_parameter"),
    ({"response_format": {"type": "text"}}, moved("response_format", "text.format"), None,
     "unsupported_parameter"),
    ({"reasoning_effort": "low"}, moved("reasoning_effort", "reasoning.effort"), None,
     "unsupported_parameter"),
    ({"max_completion_tokens": 5}, moved("max_completion_tokens", "max_output_tokens"), None,
     "unsupported_parameter"),
    ({"max_tokens": 5}, moved("max_tokens", "max_output_tokens"), None, "unsupported_parameter"),
    ({"max_output_tokens": 0}, "Invalid 'max_output_tokens': integer below minimum value. "
     "Expected a value >= 1, but got 0 instead.", "max_output_tokens",
     "integer_below_min_value"),
    ({"temperature": -1}, "Invalid 'temperature': decimal below minimum value. Expected a value "
     ">= 0, but got -1 instead.", "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "Invalid 'temperature': decimal above maximum value. Expected a value "
     "<= 2, but got 2.1 instead.", "temperature", "decimal_above_max_value"),
    ({"top_logprobs": 21}, "Invalid 'top_logprobs': integer above maximum value. Expected a value "
     "<= 20, but got 21 instead.", "top_logprobs", "integer_above_max_value"),
    ({"metadata": {str(n): "" for n in range(17)}}, "Invalid 'metadata': object too long. "
     "Expected an object with maximum length 16, but got an object with length 17 instead.",
     "metadata", "object_above_max_properties"),
    ({"include": ["x"]}, wrong("x", "'file_search_call.results', 'web_search_call.results', "
     "'web_search_call.action.sources', 'message.input_image.image_url', "
     "'computer_call_output.output.image_url', 'code_interpreter_call.outputs', "
     "'reasoning.encrypted_content', and 'message.output_text.logprobs'."), "include[0]", WRONG),
    ({"truncation": "x"}, wrong("x", "'auto' and 'disabled'."), "truncation", WRONG),
    ({"reasoning": {"effort": "x"}}, wrong("x", "'none', 'minimal', 'low', 'medium', 'high', "
     "'xhigh', and 'max'."), "reasoning.effort", WRONG),
    ({"reasoning": {"generate_summary": "auto"}}, "Unknown parameter: "
     "'reasoning.generate_summary'. Did you mean 'reasoning.summary'?",
     "reasoning.generate_summary", "unknown_parameter"),
    ({"previous_response_id": "resp_1", "conversation": "conv_1"},
     "Mutually exclusive parameters: ''. Ensure you are only providing one of: "
     "'previous_response_id' or 'conversation'.", None, "mutually_exclusive_parameters"),
    ({"conversation": 5}, of_type("conversation", "one of a string or object", "an integer"),
     "conversation", TYPE),
    # Items.
    ({"input": [5]}, of_type("input[0]", "an input item", "an integer"), "input[0]", TYPE),
    ({"input": [None]}, of_type("input[0]", "an input item", "an object"), "input[0]", TYPE),
    ({"input": [{"role": "x", "content": ""}]},
     wrong("x", "'assistant', 'system', 'developer', and 'user'."), "input[0]", WRONG),
    ({"input": [{"type": "message", "content": ""}]},
     wrong("", "'assistant', 'system', 'developer', and 'user'."), "input[0]", WRONG),
    ({"input": [{"role": "user"}]}, "Missing required parameter: 'input[0].content'.",
     "input[0].content", MISSING),
    ({"input": [user(None)]}, "Missing required parameter: 'input[0].content'.",
     "input[0].content", MISSING),
    ({"input": [user(5)]},
     of_type("input[0].content", "one of a string or array of objects", "an integer"),
     "input[0].content", TYPE),
    ({"input": [user([{"type": ["x"], "text": "a"}])]}, wrong("['x']", PARTS),
     "input[0].content[0].type", WRONG),
    ({"input": [call("c"), output("c", [{"type": {}, "text": "a"}])]}, wrong("{}", PARTS),
     "input[1].output[0].type", WRONG),
    ({"input": [user([{"type": "text", "text": "a"}])]}, wrong("text", PARTS),
     "input[0].content[0].type", WRONG),
    ({"input": [user(["a"])]}, of_type("input[0].content[0]", "an object", "a string"),
     "input[0].content[0]", TYPE),
    ({"input": [user([{"text": "a"}])]}, "Missing required parameter: "
     "'input[0].content[0].type'.", "input[0].content[0].type", MISSING),
    ({"input": [user([{"type": "output_text", "text": "a"}])]}, wrong("output_text", USER),
     "input[0].content[0]", WRONG),
    ({"input": [{"role": "assistant", "content": [{"type": "input_text", "text": "a"}]}]},
     wrong("input_text", "'output_text' and 'refusal'."), "input[0].content[0]", WRONG),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
     "Missing required parameter: 'input[0].arguments'.", "input[0].arguments", MISSING),
    ({"input": [user(), call("call_1")]}, "No tool output found for function call call_1.",
     "input", None),
    ({"input": [user(), output("call_1")]},
     "No tool call found for function call output with call_id call_1.", "input", None),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "p", "input": ""}]},
     "No tool output found for custom tool call c.", "input", None),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": ""}]},
     "No tool call found for custom tool call output with call_id c.", "input", None),
    ({"input": [call("c"), output(None, name="g")]},
     "Missing required parameter: 'input[1].call_id'.", "input[1].call_id", MISSING),
    ({"input": [{"id": "rs_1"}]}, "Item with id 'rs_1' not found.", "input", None),
    ({"input": [{"type": "item_reference", "id": "rs_1"}], "store": False},
     "Item with id 'rs_1' not found. Items are not persisted when `store` is set to false. Try "
     "again with `store` set to true, or remove this item from your input.", "input", None),
    ({"input": [{"type": "compaction_trigger"}]}, "Unsupported parameter: 'input[0].type' is not "
     "supported. This server does not compact conversations.", "input[0].type",
     "unsupported_parameter"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "Invalid 'input': it has no message, "
     "and no item that becomes one. Send a message.", "input", WRONG),
    # Parts.
    ({"input": [user([{"type": "input_image", "file_id": "file_1"}])]},
     "Unsupported parameter: 'input[0].content[0].file_id' is not supported. Send the image as a "
     "data URL, 'data:image/png;base64,…'.", "input[0].content[0].file_id",
     "unsupported_parameter"),
    ({"input": [user([{"type": "input_image"}])]},
     "Missing required parameter: 'input[0].content[0].image_url'.",
     "input[0].content[0].image_url", MISSING),
    ({"input": [user([{"type": "scoped_content"}])]}, "Unsupported parameter: "
     "'input[0].content[0].type' is not supported. Omit parts of type 'scoped_content'.",
     "input[0].content[0].type", "unsupported_parameter"),
    *(
        ({"input": [user([{**FILES, name: "x"}])]}, f"Unsupported parameter: "
         f"'input[0].content[0].{name}' is not supported. Send the content of the file as text.",
         f"input[0].content[0].{name}", "unsupported_parameter")
        for name in ("file_id", "file_url")
    ),
    *(
        ({"input": [user([{**FILES, "file_data": data}])]}, "Unsupported parameter: "
         "'input[0].content[0].file_data' is not supported. Only PDF files and text in UTF-8 are "
         "read. Send the text of the file in UTF-8, or its pages as images.",
         "input[0].content[0].file_data", "unsupported_parameter")
        for data in (HIDDEN_PDF, "/w==", "AAAA")
    ),
    *(
        ({"input": [user([{**FILES, "file_data": data}])]}, "Invalid "
         "'input[0].content[0].file_data': expected a data URL or base64.",
         "input[0].content[0].file_data", WRONG)
        for data in ("?", "")
    ),
    ({"input": [user([FILES])]}, "Missing required parameter: "
     "'input[0].content[0].file_data'.", "input[0].content[0].file_data", MISSING),
    ({"input": [user([{"type": "input_audio", "audio_url": "https://a/b.wav"}])]},
     "Unsupported parameter: 'input[0].content[0].audio_url' is not supported. Send a data URL, "
     "'data:audio/wav;base64,…' or audio/mpeg.", "input[0].content[0].audio_url",
     "unsupported_parameter"),
    ({"input": [user([{"type": "input_audio"}])]}, "Missing required parameter: "
     "'input[0].content[0].input_audio'.", "input[0].content[0].input_audio", MISSING),
    # Tools and formats.
    ({"tools": [CHAT_TOOL]}, "Missing required parameter: 'tools[0].name'.", "tools[0].name",
     MISSING),
    ({"tools": [TOOL], "tool_choice": CHAT_TOOL}, "Missing required parameter: "
     "'tool_choice.name'.", "tool_choice.name", MISSING),
    ({"text": {"format": NESTED}}, "Missing required parameter: 'text.format.name'.",
     "text.format.name", MISSING),
    ({"text": {"format": {"type": "x"}}}, wrong("x", "'json_object', 'text', and 'json_schema'."),
     "text.format.type", WRONG),
    ({"tool_choice": "required"},
     "Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice", None),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "X"}},
     "Tool choice 'X' not found in 'tools' parameter.", "tool_choice", None),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}},
     "Tool choice 'f' not found in 'tools' parameter.", "tool_choice", None),
    ({"tools": [TOOL], "tool_choice": "x"}, wrong("x", "'none', 'auto', and 'required'."),
     "tool_choice", WRONG),
    ({"tools": [TOOL, HOSTED], "tool_choice": HOSTED}, "Unsupported parameter: 'tool_choice' is "
     "not supported. This server does not run tools of type 'web_search_preview'. Choose a "
     "function or a custom tool.", "tool_choice", "unsupported_parameter"),
    ({"tools": [TOOL, HOSTED],
      "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED]}},
     "Unsupported parameter: 'tool_choice' is not supported. This server does not run tools of "
     "type 'web_search_preview'. Choose a function or a custom tool.", "tool_choice",
     "unsupported_parameter"),
    ({"tools": [HOSTED], "tool_choice": "required"}, "Unsupported parameter: 'tools[0]' is not "
     "supported. This server does not run it. Choose a function or a custom tool.", "tools[0]",
     "unsupported_parameter"),
    ({"tools": [{**TOOL, "parameters": {"type": "x"}}]}, "Invalid schema for function "
     "'f': In context=('type',), 'x' is not valid under any of the given schemas.",
     "tools[0].parameters", "invalid_function_parameters"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL]},
                {"type": "function", "name": "n__f"}]},
     "Invalid 'tools[1].name': another tool has the name 'n__f' already. Rename one of them.",
     "tools[1].name", WRONG),
    ({"tools": [{**SPACE, "tools": [SPACE]}]}, wrong("namespace", f"'function', 'custom', {RUN}"),
     "tools[0].tools[0].type", WRONG),
    ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [ALLOWED]}},
     wrong("allowed_tools", f"'function', 'custom', {RUN}"), "tool_choice.tools[0].type", WRONG),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message", "param", "code"), CASES)
def test_a_malformed_request_gets_openais_error(
    fields: dict[str, Any], message: str, param: str | None, code: str | None
) -> None:
    """A malformed request is an error with OpenAI's message, parameter and code."""
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    error = caught.value
    assert (error.message, error.param, error.code) == (message, param, code)
    status, body, _ = render(error)
    assert status == (404 if message.startswith("Item with id") else 400)
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["model", "input"])
def test_the_first_missing_field_is_named(name: str) -> None:
    """A missing model or input is reported before the mistakes in other fields."""
    from latimer.adapter.validation import parse
    from latimer.schemas.openai.responses import ResponseRequest
    from pydantic import TypeAdapter

    body = {"model": "m", "input": "Hi", "temperature": -1}
    del body[name]
    with pytest.raises(InvalidRequest) as caught:
        parse(TypeAdapter(ResponseRequest), (), body)
    error = caught.value
    message = f"Missing required parameter: '{name}'."
    assert (error.message, error.param, error.code) == (message, name, MISSING)


def test_unknown_types_are_listed_with_the_known_ones() -> None:
    """An item or a tool of an unknown type is an error that lists the known types."""
    for fields, param, first, last in (
        ({"input": [{"type": "x"}]}, "input[0]", "additional_tools", "web_search_call"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "function", "web_search_preview"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "function", "web_search_preview"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read(**fields)
        error = caught.value
        assert (error.param, error.code) == (param, WRONG)
        assert error.message.startswith(f"Invalid value: 'x'. Supported values are: '{first}', ")
        assert error.message.endswith(f", and '{last}'.")


def test_an_unknown_model_is_a_400() -> None:
    """An unknown model is a 400 with OpenAI's message, followed by the known models."""
    error = in_responses(UnknownModel("x", " This server has: demo."))
    status, body, _ = render(error)
    assert status == 400
    assert body["error"] == {
        "message": "The requested model 'x' does not exist. This server has: demo.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_a_long_input_gets_both_texts() -> None:
    """The error of an input beyond the context has chat's text and that of the Responses API."""
    error = in_responses(ContextExceeded(100, 120, 20))
    status, body, _ = render(error)
    assert (status, body["error"]["param"]) == (400, "input")
    assert body["error"]["code"] == "context_length_exceeded"
    message = body["error"]["message"]
    assert message.startswith("This model's maximum context length is 100 tokens.")
    assert (message.count("120 tokens"), message.count("Please"), "messages" in message) == (
        1, 1, False,
    )  # fmt: skip
    assert message.endswith(
        "Your input exceeds the context window of this model. Please adjust your input and try "
        "again."
    )


def test_errors_about_messages_name_the_input() -> None:
    """An error about a path of chat's messages names the path in the request."""
    names = {"messages[2].content[1].image_url.url": "input[0].content[1].image_url"}
    path = "messages[2].content[1].image_url.url"
    error = in_responses(InvalidRequest(f"Invalid '{path}': no.", path), names)
    assert render(error)[1]["error"]["message"] == "Invalid 'input[0].content[1].image_url': no."
    error = in_responses(InvalidRequest("Omit 'max_tokens' and 'messages'.", "messages"))
    assert render(error)[1]["error"]["message"] == "Omit 'max_output_tokens' and 'input'."
