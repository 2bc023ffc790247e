"""The outcome of each field of another server: the request of Latimer's own that it equals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from latimer.adapter.dialects import TABLES, Field, Where
from support.recordings import DEMO_CHATML

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
OBJECT = {"type": "object"}
GBNF = 'root ::= "yes" | "no"'
COUNT = [{"role": "user", "content": "Count to 12."}]
BASES: dict[Where, dict[str, Any]] = {
    "chat": {"messages": COUNT},
    "completions": {"prompt": DEMO_CHATML.format("Count to 12.")},
    "responses": {"input": COUNT},
}
PATHS: dict[Where, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Values that fix the fields that a request does not name.
STILL = {"model": "demo", "temperature": 0, "max_tokens": 16, "seed": 1}

# The fields that have another name in the Responses API.
MOVED = {"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}


def own(where: Where, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return Latimer's own fields as an endpoint names them."""
    if where != "responses":
        return dict(fields)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name != "stream_options" and (name, value) not in UNLIMITED:
            found |= sent(MOVED.get(name, name), value)
    return found


UNLIMITED = (("max_tokens", -1), ("max_tokens", -2))

# Latimer's own fields for the example of each mapped field.
EQUAL: dict[str, dict[str, Any]] = {
    "ebnf": {"grammar": GBNF},
    "structured_outputs": {"regex": "yes|no"},
    "structured_outputs.json": {"json_schema": SCHEMA},
    "structured_outputs.json_object": {"json_schema": OBJECT},
    "structured_outputs.regex": {"regex": "yes|no"},
    "structured_outputs.choice": {"grammar": GBNF},
    "structured_outputs.grammar": {"grammar": GBNF},
    "guided_json": {"json_schema": SCHEMA},
    "guided_json_object": {"json_schema": OBJECT},
    "guided_regex": {"regex": "yes|no"},
    "guided_choice": {"grammar": GBNF},
    "guided_grammar": {"grammar": GBNF},
    "format": {"json_schema": OBJECT},
    "grammar_string": {"grammar": GBNF},
    "typical": {"typical_p": 0.9},
    "nsigma": {"top_n_sigma": 1.0},
    "tfs_z": {"tfs": 0.9},
    "options.tfs_z": {"tfs": 0.9},
    "dynamic_temperature": {"temperature": 1.0, "dynatemp_range": 0.5},
    "dynatemp_low": {},
    "dynatemp_high": {},
    "mirostat_mode": {"mirostat": 2},
    "rep_pen": {"repeat_penalty": 1.1, "repeat_last_n": 320},
    "rep_pen_range": {"repeat_last_n": 128},
    "repetition_penalty": {"repeat_penalty": 1.1, "repeat_last_n": -1},
    "repetition_penalty_range": {"repeat_last_n": 128},
    "ban_eos_token": {"ignore_eos": True},
    "use_default_badwordsids": {"ignore_eos": True},
    "min_new_tokens": {"min_tokens": 5},
    "min_length": {"min_tokens": 5},
    "custom_token_bans": {"logit_bias": {"5": -100, "7": -100}},
    "do_sample": {"temperature": 0},
    "sampler_seed": {"seed": 7},
    "n_cmpl": {"n": 2},
    "n_predict": {"max_tokens": 20},
    "num_predict": {"max_tokens": 20},
    "max_new_tokens": {"max_tokens": 20},
    "max_length": {"max_tokens": 20},
    "stop_sequence": {"stop": ["5"]},
    "stopping_strings": {"stop": ["5"]},
    "custom_stopping_strings": {"stop": ["5"]},
    "n_probs": {"logprobs": 3},
    "usage": {},
    "usage.include": {},
    "thinking": {"enable_thinking": False},
    "thinking.type": {"enable_thinking": False},
    "think": {"enable_thinking": False},
    "reasoning": {"reasoning_effort": "low"},
    "reasoning.effort": {"reasoning_effort": "low"},
    "reasoning.enabled": {"enable_thinking": False},
    "continue_assistant_turn": {"continue_final_message": True},
    "options": {},
    "options.num_predict": {"max_tokens": 20},
}
# The rest of a request for a field that needs it.
_MESSAGES = [*COUNT, {"role": "assistant", "content": "1, 2"}]
_CONTINUED = {"messages": _MESSAGES}
_PLACED = [{"role": "user", "content": "{{[INPUT]}}Hi"}]
_BOUNDS = {"dynatemp_low": 0.5, "dynatemp_high": 1.5}
AROUND: dict[tuple[Where, str], dict[str, Any]] = {
    ("chat", "continue_final_message"): _CONTINUED,
    ("chat", "continue_assistant_turn"): _CONTINUED,
    ("responses", "continue_final_message"): {"input": _MESSAGES},
    ("responses", "continue_assistant_turn"): {"input": _MESSAGES},
    ("responses", "dynamic_temperature"): _BOUNDS,
    ("chat", "dynamic_temperature"): _BOUNDS,
    ("completions", "dynamic_temperature"): _BOUNDS,
    **{(where, "rep_pen_slope"): {"rep_pen": 1.1} for where in TABLES},
    **{(where, "trim_stop"): {"stop": "5"} for where in TABLES},
    ("chat", "replace_instruct_placeholders"): {"messages": _PLACED},
    ("completions", "replace_instruct_placeholders"): {"prompt": "{{[INPUT]}}Hi"},
    ("responses", "replace_instruct_placeholders"): {"input": _PLACED},
}


def rows(*verdicts: str) -> list[tuple[Where, Field]]:
    """Return the fields with some verdicts, at each endpoint that has them."""
    return [
        (where, field)
        for where, fields in TABLES.items()
        for field in fields.values()
        if field.verdict in verdicts
    ]


def sent(name: str, value: Any) -> dict[str, Any]:
    """Return a field as it is sent; a dot separates an object from its field."""
    outer, _, inner = name.partition(".")
    return {outer: {inner: value}} if inner else {name: value}


def equal(where: Where, field: Field) -> dict[str, Any]:
    """Return Latimer's own fields for the example of a mapped field."""
    if field.name == "n_probs" and where == "chat":
        return {"logprobs": True, "top_logprobs": 3}
    if field.name == "n_probs" and where == "responses":
        return {"top_logprobs": 3}
    if field.apply is None:
        return {field.name.rpartition(".")[2]: field.example}
    return own(where, EQUAL[field.name])


def body_of(where: Where, field: Field, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request with some fields, and with defaults that do not contradict them."""
    ours = equal(where, field) if field.verdict == "mapped" else {}
    still = {name: value for name, value in own(where, STILL).items() if name not in ours}
    around = AROUND.get((where, field.name), {})
    return {**still, **BASES[where], **around, **fields}
