"""Outputs of models of each family, after the documentation of their formats.

The keys of `FAMILIES` are the names of published templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Call: TypeAlias = tuple[str, Mapping[str, Any]]
ZURICH: Call = ("get_weather", {"city": "Zürich", "days": 2})
ROME: Call = ("get_weather", {"city": 'L\'"Aquila"\n<b>', "days": 1})


class Family(NamedTuple):
    """The format of a model's answers.

    Args:
        thought: reasoning that is "Hmm."; empty if the model has none.
        calls: writes calls, with the markers around them.
        marks: the strings that are control tokens.
        fields: the fields of a request for reasoning.
        recipient: the text before content.
        between: the text between content and calls.
    """

    thought: str
    calls: Callable[[Sequence[Call]], str]
    marks: Sequence[str] = ()
    fields: Mapping[str, Any] = {}
    recipient: str = ""
    between: str = ""

    @property
    def reasoning(self) -> str | None:
        """The reasoning of an answer."""
        return "Hmm." if self.thought else None

    def text(self, *calls: Call, content: str = "") -> str:
        """Return reasoning, content and calls."""
        said = self.recipient + content if content else ""
        between = self.between if content and calls else ""
        return f"{self.thought}{said}{between}{self.calls(calls) if calls else ''}"


def each(
    call: Callable[[str, Mapping[str, Any]], str], begin: str = "", end: str = "", between: str = ""
) -> Callable[[Sequence[Call]], str]:
    """Return a function that writes calls one after another, between two markers."""

    def calls(given: Sequence[Call]) -> str:
        return begin + between.join(call(*one) for one in given) + end

    return calls


def as_json(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def glm(line: str) -> Callable[[str, Mapping[str, Any]], str]:
    """Return a function that writes GLM's calls, with tags that end lines or do not."""

    def call(name: str, arguments: Mapping[str, Any]) -> str:
        lines = [f"{line}<tool_call>{name}"]
        for key, value in arguments.items():
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{value}</arg_value>"]
        return line.join([*lines, "</tool_call>"])

    return call


def minimax(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of MiniMax M2."""
    given = [f'<parameter name="{key}">{value}</parameter>' for key, value in arguments.items()]
    return "\n".join([f'<invoke name="{name}">', *given, "</invoke>\n"])


def dsml(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of DeepSeek V3.2."""
    given = [
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value}</{DSML}parameter>"
        for key, value in arguments.items()
    ]
    return "\n".join([f'<{DSML}invoke name="{name}">', *given, f"</{DSML}invoke>\n"])


def v3_1(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of DeepSeek V3.1."""
    return f"{V3_1[1]}{name}{V3_1[2]}{as_json(arguments)}{V3_1[3]}"


def deepseek(block: str) -> Family:
    """Return the family of a version, which has its own name for the block of calls."""
    calls = each(dsml, f"\n\n<{DSML}{block}>\n", f"</{DSML}{block}>")
    return Family("Hmm.</think>", calls, ("</think>", DSML), THINKING)


def kimi(given: Sequence[Call]) -> str:
    """Return calls of Kimi K2, which are numbered."""
    calls = [
        f"{KIMI[1]}functions.{name}:{index}{KIMI[2]}{as_json(arguments)}{KIMI[3]}"
        for index, (name, arguments) in enumerate(given)
    ]
    return "".join([KIMI[0], *calls, KIMI[4]])


def lfm(write: Callable[[Any], str]) -> Callable[[Sequence[Call]], str]:
    """Return a function that writes calls of LFM2, which are Python, with values in one manner."""

    def call(name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={write(value)}' for key, value in arguments.items())})"

    return each(call, f"{LFM[0]}[", f"]{LFM[1]}", ", ")


def gemma(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of Gemma 4."""
    given = [
        f"{key}:{f'{MARK}{value}{MARK}' if isinstance(value, str) else value}"
        for key, value in arguments.items()
    ]
    return f"<|tool_call>call:{name}{{{','.join(given)}}}<tool_call|>"


def functionary_v3_1(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of Functionary v3.1."""
    return f"<function={name}>{as_json(arguments)}</function>"


def functionary_v3_2(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call of Functionary v3.2."""
    return f"{name}\n{as_json(arguments)}"


DSML = "｜DSML｜"
MARK = '<|"|>'
THINKING = {"enable_thinking": True}
THOUGHT = "<think>Hmm.</think>"
THINK_MARKS = ("<think>", "</think>")
V3_1 = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
GLM_MARKS = (*THINK_MARKS, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>")
MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA = Family(
    "<|channel>thought\nHmm.\n<channel|>", each(gemma),
    ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"), THINKING,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "GLM-4.6": Family("\n<think>Hmm.</think>\n", each(glm("\n")), GLM_MARKS),
    "GLM-4.7-Flash": Family("Hmm.</think>", each(glm("")), GLM_MARKS[1:]),
    "MiniMax-M2": Family(
        "Hmm.\n</think>\n\n", each(minimax, f"{MINIMAX[0]}\n", MINIMAX[1]), ("</think>", *MINIMAX)
    ),
    "deepseek-ai-DeepSeek-V3.2": deepseek("function_calls"),
    "deepseek-ai-DeepSeek-V4": deepseek("tool_calls"),
    "deepseek-ai-DeepSeek-V3.1": Family(
        "Hmm.</think>", each(v3_1, V3_1[0], V3_1[-1]), ("</think>", *V3_1), THINKING
    ),
    "Kimi-K2-Thinking": Family(THOUGHT, kimi, (*THINK_MARKS, *KIMI)),
    "Kimi-K2-Instruct": Family("", kimi, KIMI),
    "moonshotai-Kimi-K2": Family("", kimi, KIMI),
    "LFM2-8B-A1B": Family("", lfm(as_json), LFM),
    "LFM2.5-8B-A1B": Family(THOUGHT, lfm(repr), (*THINK_MARKS, *LFM)),
    "LFM2.5-Instruct": Family(THOUGHT, lfm(as_json), (*THINK_MARKS, *LFM)),
    "google-gemma-4-31B-it": GEMMA,
    "google-gemma-4-31B-it-interleaved": GEMMA,
    "meetkai-functionary-medium-v3.1": Family("", each(functionary_v3_1)),
    "meetkai-functionary-medium-v3.2": Family(
        "", each(functionary_v3_2, between=">>>"), recipient="all\n", between=">>>"
    ),
}


def tokens(text: str, marks: Sequence[str], apart: str) -> list[str]:
    """Divide a text into tokens, all different: each mark once, and pieces of other text.

    Args:
        apart: characters that are no piece of their own.
    """
    found: list[str] = []
    while text:
        left = [one for one in marks if one not in found]
        mark = next((one for one in left if text.startswith(one)), "")
        ends = [at for one in (*left, ", ") if (at := text.find(one)) > 0]
        size = min([*ends, 7])
        while text[:size] in (*found, *apart) or len(text) - size == 1:
            size += 1
        found.append(mark or text[:size])
        text = text[len(found[-1]) :]
    return found
