"""All formats in which models write tool calls: a row for each."""

from __future__ import annotations

import re

from ....backends.grammar.notation import GEMMA, MARK, PYTHON_CALL
from .base import NamedFormat, ToolCallFormat
from .functionary import CONTENT, Functionary31, Functionary32
from .harmony import CHANNEL, MARKERS, MESSAGE, Harmony
from .json_formats import ARGS, CALL_ID, PYTHON_TAG, Llama3, MistralParser
from .notations import Gemma4Parser, PythonCallParser, as_gemma_arguments, keywords
from .section_formats import DEEPSEEK_PREFACE, Section
from .tag_formats import Tagged
from .tag_schemas import Tags

_DSML = "｜DSML｜"
_DSML_TAGS = Tags.of(
    call=f'<{_DSML}invoke name="{{}}">',
    key=f'<{_DSML}parameter name="{{}}" string="true">',
    key_of_json=f'<{_DSML}parameter name="{{}}" string="false">',
    value=f"{{}}</{_DSML}parameter>",
    end=f"</{_DSML}invoke>",
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
_KIMI_K2 = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
# In the first template, the calls of each message are numbered from 0.
_RESTARTS = re.compile(r"""[:]['"]\s*[+~]\s*\(?loop\.index0""")

# Hermes, Qwen 2.5, Qwen 3 and many others: https://github.com/NousResearch/Hermes-Function-Calling.
# Other formats have other content between the same tags.
HERMES = ToolCallFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    patterns=("<tool_call>", ('"name"', '\\"name\\"')),
    absent=("<function=", "<arg_key>"),
)
# The first format that matches a template is used.
FORMATS: tuple[ToolCallFormat, ...] = (
    HERMES,
    # gpt-oss: https://cookbook.openai.com/articles/openai-harmony.
    Harmony(
        "harmony",
        tokens=MARKERS,
        patterns=(CHANNEL, "commentary", "functions."),
        answer=f"{CHANNEL}final{MESSAGE}",
        reasons=True,
    ),
    # Qwen3-Coder: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
    Tagged(
        "xml",
        "<tool_call>",
        "</tool_call>",
        tags=Tags.of(
            "<function={}>", "<parameter={}>", "{}</parameter>", "</function>", lines=True
        ),
    ),
    # GLM 4.5 and its successors, on lines of their own up to GLM 4.6:
    # https://huggingface.co/zai-org/GLM-4.6 and https://huggingface.co/zai-org/GLM-4.7-Flash.
    Tagged(
        "glm",
        "<tool_call>",
        "</tool_call>",
        tokens=(
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        is_tight=True,
        in_order=True,
        interrupts=True,
        tags=Tags.of("{}", "<arg_key>{}</arg_key>", "<arg_value>{}</arg_value>", "</tool_call>"),
    ),
    # https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/docs/tool_calling_guide.md.
    Tagged(
        "minimax",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        block="section",
        in_order=True,
        tags=Tags.of('<invoke name="{}">', '<parameter name="{}">', "{}</parameter>", "</invoke>"),
    ),
    # The calls of DeepSeek R1 and the first V3 are fenced code between the same markers, which is
    # another format.
    Section(
        "deepseek-v3.1",
        _DEEPSEEK[0],
        _DEEPSEEK[-1],
        tokens=_DEEPSEEK,
        patterns=(_DEEPSEEK[2],),
        absent=("```json",),
        in_order=True,
        preface=DEEPSEEK_PREFACE,
    ),
    # Templates insert the token into the tags. The block of calls has another name in each version:
    # https://huggingface.co/deepseek-ai/DeepSeek-V3.2/blob/main/encoding/README.md.
    *(
        Tagged(
            title,
            f"<{_DSML}{block}>",
            f"</{_DSML}{block}>",
            tokens=(_DSML,),
            patterns=(_DSML, f"{block}>", "invoke name="),
            block="section",
            in_order=True,
            tags=_DSML_TAGS,
        )
        for title, block in (("deepseek-v3.2", "function_calls"), ("deepseek-v4", "tool_calls"))
    ),
    # Tokenizers v11 and later: https://docs.mistral.ai/capabilities/function_calling.
    NamedFormat(
        "mistral-args",
        "[TOOL_CALLS]",
        tokens=("[TOOL_CALLS]", ARGS),
        patterns=("[TOOL_CALLS]", ARGS),
        is_tight=True,
        call_parser=MistralParser,
        id_size=9,
        head=f"{{}}{ARGS}",
        spellings=(f"{{}}{ARGS}", f"{{}}{CALL_ID}"),
    ),
    ToolCallFormat(
        "mistral",
        "[TOOL_CALLS]",
        patterns=("[TOOL_CALLS]",),
        block="list",
        call_parser=MistralParser,
        id_size=9,
    ),
    # Phi-4 mini, Granite 3.3.
    ToolCallFormat(
        "tool-call-list",
        "<|tool_call|>",
        "<|/tool_call|>",
        tokens=("<|tool_call|>",),
        block="list",
    ),
    ToolCallFormat(
        "command-r7b",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "tool_name",
        "parameters",
        block="list",
    ),
    # https://github.com/MeetKai/functionary. Other formats have parameters in tags after the same
    # tag as version 3.1.
    Functionary31(
        "functionary-v3.1",
        "<function=",
        "</function>",
        tokens=(PYTHON_TAG,),
        absent=("<parameter=",),
        is_tight=True,
        in_order=True,
        head="{}>",
        spellings=("<function={}>",),
    ),
    Functionary32(
        "functionary-v3.2",
        patterns=(f">>>{CONTENT}",),
        optional_begin=">>>",
        answer=f"{CONTENT}\n",
        recipient=f"{CONTENT}\n",
        in_order=True,
        head="{}\n",
        spellings=(">>>{}\n",),
    ),
    # https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4.
    NamedFormat(
        "gemma4",
        "<|tool_call>",
        "<tool_call|>",
        tokens=("<|tool_call>", "<tool_call|>", MARK),
        patterns=("<|tool_call>call:",),
        call_parser=Gemma4Parser,
        in_order=True,
        again="call:",
        head="call:{}",
        spellings=("call:{}{",),
        notation=GEMMA,
        write_arguments=as_gemma_arguments,
    ),
    # https://huggingface.co/moonshotai/Kimi-K2-Instruct, `docs/tool_call_guidance.md`.
    Section(
        "kimi-k2",
        _KIMI_K2[0],
        _KIMI_K2[-1],
        tokens=_KIMI_K2,
        patterns=(_KIMI_K2[0], _KIMI_K2[2]),
        absent=(_RESTARTS,),
        in_order=True,
        interrupts=True,
        numbered="conversation",
    ),
    # The first template, of July 2025.
    Section(
        "kimi-k2-first",
        _KIMI_K2[0],
        _KIMI_K2[-1],
        tokens=_KIMI_K2,
        patterns=(_KIMI_K2[0], _KIMI_K2[2], _RESTARTS),
        numbered="message",
    ),
    # https://docs.liquid.ai/lfm/key-concepts/tool-use. Some templates mention only the tokens of
    # the list of tools, and that of LFM2.5 has no tokens.
    NamedFormat(
        "lfm2",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        patterns=("tools", ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")),
        block="list",
        call_parser=PythonCallParser,
        in_order=True,
        spellings=("{}(",),
        notation=PYTHON_CALL,
        write_arguments=keywords,
    ),
    # https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/.
    Llama3(
        "llama3",
        tokens=(PYTHON_TAG,),
        arguments="parameters",
        patterns=("tools", '"name"', '"parameters"', (PYTHON_TAG, "<|start_header_id|>")),
        absent=("<function=",),
        bare=True,
        optional_begin=PYTHON_TAG,
    ),
    # The whole answer is JSON.
    ToolCallFormat(
        "bare",
        patterns=("tools", '"name"', ('"arguments"', '"parameters"')),
        absent=("<function=",),
        bare=True,
    ),
)


def format_of(template: str) -> ToolCallFormat | None:
    """Return the tool call format of a template; None if it has no tools or an unknown format."""
    return next((one for one in FORMATS if one.matches(template)), None)


_TOOLS = re.compile(r"\btools\b")


def completed(template: str) -> str:
    """Return a template that shows tools if its format says how, or else the same template."""
    if _TOOLS.search(template) is not None:
        return template
    form = format_of(template)
    return template if form is None else form.preface + template
