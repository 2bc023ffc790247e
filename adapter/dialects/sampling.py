"""Sampling fields of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import missing, wrong_type, wrong_value
from .fields import Draft, Field, ignored, mapped, refused, same

# The whole context.
WHOLE = -1
# koboldcpp's default for `rep_pen_range`.
KOBOLDCPP_RANGE = 320
# Two temperatures that differ by less are the same number, rounded differently.
_CLOSE = 1e-6

# llama.cpp's order of samplers, which is Latimer's, and other names of its samplers.
_ORDER = [
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
]
_ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "tfs_z": ""}
_LETTERS = "edskypmxt"
# The order that text-generation-webui and SillyTavern send by default, without the samplers below.
# With `temperature_last`, only top_p and typical_p are in another order.
_PRIORITY = [
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry",
    "temperature",
    "dynamic_temperature",
    "top_k",
    "top_p",
    "typical_p",
    "min_p",
    "xtc",
]
# Samplers whose place has no effect: they can only be switched off, or replace the others, or only
# koboldcpp has them, which Latimer lets apply its samplers in its own order.
_UNPLACED = frozenset(
    {
        "adaptive_p", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "mirostat",
        "no_repeat_ngram", "quadratic_sampling", "tfs", "top_a",
    }
)  # fmt: skip
# It commutes with the temperature, and the two programs place it before and after that.
_SIGMA = "top_n_sigma"


def _is_default(value: Any) -> bool:
    """Return True for the samplers of text-generation-webui in its default order.

    They are a list, or a text with a name on each line. Older versions have no xtc and fewer
    penalties, and samplers that a list omits are the first.
    """
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    names = [name for name in names if name not in _UNPLACED]
    if _SIGMA in names and "top_k" in names[: names.index(_SIGMA)]:
        return False
    placed = [name for name in names if name != _SIGMA]
    order = [name for name in _PRIORITY if name != "xtc" or name in placed]
    return placed == order[len(order) - len(placed) :]


def _usual(value: Any) -> bool:
    """Return True for samplers in llama.cpp's order, as names or as letters."""
    if isinstance(value, str):
        return value == _LETTERS
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    names = [_ALIASES.get(name, name) for name in value]
    return [name for name in names if name] == _ORDER


def over_all(draft: Draft, value: Any) -> None:
    """Set `repeat_penalty` over prompt and answer, unless the request names a window."""
    draft.set("repeat_penalty", value)
    draft.default("repeat_last_n", WHOLE)


def as_koboldcpp(draft: Draft, value: Any) -> None:
    """Set `repeat_penalty` with koboldcpp's window, unless the request names one."""
    draft.set("repeat_penalty", value)
    draft.default("repeat_last_n", KOBOLDCPP_RANGE)


def window(draft: Draft, value: Any) -> None:
    """Set `repeat_last_n`; 0 means the whole context, unless another field names a window.

    SillyTavern sends one number under all names of the window, and 0 differs between servers.
    """
    if value == 0:
        draft.default("repeat_last_n", WHOLE)
    else:
        draft.set("repeat_last_n", value)


def greedy(draft: Draft, value: Any) -> None:
    """Set the temperature to 0 if sampling is switched off."""
    if value is not False:
        raise wrong_type(draft.origin, "a boolean", value)
    draft.replace("temperature", 0)


def bound(draft: Draft, value: Any) -> None:
    """Check a bound of the temperature, which `spread` uses."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(draft.origin, "a decimal number", value)


def spread(draft: Draft, value: Any) -> None:
    """Set the temperature and its range from its bounds.

    Raises:
        InvalidRequest: the bounds contradict each other or other fields, or one of them is missing.
    """
    if value is not True:
        raise wrong_type(draft.origin, "a boolean", value)
    given = draft.given.get("dynatemp_range")
    low: Any = draft.given.get("dynatemp_low")
    high: Any = draft.given.get("dynatemp_high")
    for name, one in (("dynatemp_low", low), ("dynatemp_high", high)):
        if one is None:
            if given is not None:
                return
            raise missing(name)
        draft.origin = name
        bound(draft, one)
    if low > high:
        reason = f"expected a value <= 'dynatemp_high', {high}, but got {low} instead."
        raise wrong_value("dynatemp_low", reason)
    middle, half = (low + high) / 2, (high - low) / 2
    if given is None:
        draft.replace("temperature", middle)
        draft.replace("dynatemp_range", half)
        return
    for name, one in (("temperature", middle), ("dynatemp_range", half)):
        own = draft.given.get(name)
        if not isinstance(own, int | float) or abs(own - one) > _CLOSE:
            draft.set(name, one)


def seed(draft: Draft, value: Any) -> None:
    """Set `seed`; -1 means a random seed."""
    if value != -1:
        draft.set("seed", value)


def bans(draft: Draft, value: Any) -> None:
    """Ban tokens by their ids, from a list or a string with commas."""
    ids = value.split(",") if isinstance(value, str) else value
    if not isinstance(ids, list):
        raise wrong_type(draft.origin, "token ids, as a string with commas", value)
    banned = {str(one).strip(): -100 for one in ids}
    if not all(one.isascii() and one.isdigit() and len(one) <= 10 for one in banned):
        raise wrong_value(draft.origin, "expected token ids, such as '5,7'.")
    given = draft.body.get("logit_bias")
    draft.replace("logit_bias", {**(given if isinstance(given, dict) else {}), **banned})


def _penalizes(given: Mapping[str, Any]) -> bool:
    """Return True for a request with a penalty, without which a slope has no effect."""
    names = ("rep_pen", "repeat_penalty", "repetition_penalty")
    return any(given.get(name) not in (None, 1) for name in names) or bool(
        given.get("presence_penalty")
    )


_BEAMS = "Use 'n' for several answers, or 'best_of' in completions for the best one."
_BAN = "Ban tokens with a 'logit_bias' of -100."
_SAMPLERS = "Latimer applies samplers in llama.cpp's order. Omit it."
_NONE = "Omit it, or use 'min_p' or 'top_p'."
_WORDS = "text-generation-webui"
_BOTH = "koboldcpp, text-generation-webui"

FIELDS: tuple[Field, ...] = (
    same("top_k", "vLLM, llama.cpp, Ollama, koboldcpp, LM Studio, OpenRouter", 40),
    same("min_p", "vLLM, llama.cpp, Ollama, koboldcpp, LM Studio, OpenRouter", 0.1),
    same("typical_p", "llama.cpp, Ollama", 0.9),
    mapped("typical", "koboldcpp", "`typical_p`", 0.9),
    same("top_n_sigma", "llama.cpp", 1.0),
    mapped("nsigma", _BOTH, "`top_n_sigma`", 1.0, None, 0),
    same("xtc_probability", "llama.cpp, koboldcpp", 0.5),
    same("xtc_threshold", "llama.cpp, koboldcpp", 0.1),
    same("dynatemp_range", "llama.cpp, koboldcpp", 0.5),
    same("dynatemp_exponent", "llama.cpp, koboldcpp", 1.5),
    mapped("dynamic_temperature", _WORDS, "`temperature` and `dynatemp_range`, from `dynatemp_low` "
           "and `dynatemp_high`", True, spread, False),
    mapped("dynatemp_low", _WORDS, "see `dynamic_temperature`, without which it has no effect",
           0.5, bound),
    mapped("dynatemp_high", _WORDS, "see `dynamic_temperature`, without which it has no effect",
           1.5, bound),
    same("mirostat", "llama.cpp, Ollama, koboldcpp", 2),
    mapped("mirostat_mode", _BOTH, "`mirostat`", 2, None, 0),
    same("mirostat_tau", "llama.cpp, Ollama, koboldcpp", 4.0),
    same("mirostat_eta", "llama.cpp, Ollama, koboldcpp", 0.2),
    same("dry_multiplier", "llama.cpp, koboldcpp", 0.8),
    same("dry_base", "llama.cpp, koboldcpp", 1.5),
    same("dry_allowed_length", "llama.cpp, koboldcpp", 3),
    same("dry_penalty_last_n", "llama.cpp, koboldcpp", 64),
    same("dry_sequence_breakers", "llama.cpp, koboldcpp", ["\n"]),
    same("repeat_penalty", "llama.cpp, Ollama, LM Studio", 1.1),
    same("repeat_last_n", "llama.cpp, Ollama", 128),
    mapped("rep_pen_range", "koboldcpp", "`repeat_last_n`", 128),
    mapped("repetition_penalty_range", _WORDS, "`repeat_last_n`; 0 means the whole context, unless "
           "`repeat_last_n` or `rep_pen_range` is sent", 128,
           window),
    mapped("rep_pen", "koboldcpp", "`repeat_penalty`, over 320 tokens unless `rep_pen_range` is "
           "sent", 1.1, as_koboldcpp, 1),
    mapped("repetition_penalty", "vLLM, OpenRouter, text-generation-webui",
           "`repeat_penalty`, over prompt and answer", 1.1, over_all, 1),
    refused("rep_pen_slope", "koboldcpp", "Omit it.", 0.7, 0, 1, needs=_penalizes),
    refused("encoder_repetition_penalty", _WORDS, "Send 'repeat_penalty'.", 1.2, 1),
    refused("no_repeat_ngram_size", _WORDS, "Send 'dry_multiplier'.", 3, 0),
    refused("repetition_detection", "vLLM", "Send 'dry_multiplier'.",
            {"max_pattern_size": 4, "min_count": 3}, {}),
    same("tfs", _BOTH, 0.9),
    mapped("tfs_z", "Ollama", "`tfs`", 0.9, None, 1),
    same("top_a", "koboldcpp, OpenRouter, text-generation-webui", 0.2),
    refused("epsilon_cutoff", _WORDS, _NONE, 3, 0),
    refused("eta_cutoff", _WORDS, _NONE, 3, 0),
    same("smoothing_factor", _BOTH, 0.3),
    same("smoothing_curve", _BOTH, 1.5),
    refused("penalty_alpha", _WORDS, "Omit it.", 0.6, 0),
    refused("guidance_scale", _BOTH, "Omit it.", 1.5, 1),
    ignored("negative_prompt", _BOTH, "it only has an effect with `guidance_scale`", "bad"),
    same("adaptive_target", "llama.cpp, koboldcpp", 0.5),
    same("adaptive_decay", "llama.cpp, koboldcpp", 0.9),
    refused("min_keep", "llama.cpp", "Omit it.", 3, 0),
    refused("samplers", "llama.cpp", _SAMPLERS, ["temperature"], _usual),
    refused("sampler_order", "koboldcpp", _SAMPLERS, [0, 6], [6, 0, 1, 3, 4, 2, 5], []),
    refused("sampler_priority", _WORDS, _SAMPLERS, ["temperature"], _is_default),
    refused("temperature_last", _WORDS, "The temperature is always the last sampler. Omit it.",
            False, True),
    ignored("backend_sampling", "llama.cpp", "it only selects the device that samples", True),
    same("ignore_eos", "vLLM, llama.cpp", True),
    mapped("ban_eos_token", _BOTH, "`ignore_eos`", True, None, False),
    mapped("use_default_badwordsids", "koboldcpp", "`ignore_eos`", True,
           lambda draft, value: draft.default("ignore_eos", value), False),
    same("min_tokens", "vLLM", 5),
    mapped("min_new_tokens", "SGLang, Transformers", "`min_tokens`", 5, None, 0),
    mapped("min_length", _WORDS, "`min_tokens`", 5, None, 0),
    mapped("custom_token_bans", _BOTH, "`logit_bias` of -100", "5,7", bans, ""),
    refused("banned_tokens", _BOTH, _BAN, ["word"], [], ""),
    refused("banned_strings", _BOTH, _BAN, ["word"], [], ""),
    refused("bad_words", "vLLM", _BAN, ["word"], []),
    refused("allowed_token_ids", "vLLM", "Send a 'grammar' of the allowed texts.", [5], []),
    refused("logits_processors", "vLLM", "Send 'logit_bias' or a 'grammar'.", ["a"], []),
    refused("vllm_xargs", "vLLM", "Omit it.", {"a": 1}, {}),
    refused("watermarking", "vLLM", "Omit it.", True, False),
    mapped("do_sample", _WORDS, "`temperature` 0 for false", False, greedy, True),
    mapped("sampler_seed", "koboldcpp", "`seed`; -1 means a random seed", 7, seed),
    refused("use_beam_search", "vLLM", _BEAMS, True, False),
    refused("num_beams", _WORDS, _BEAMS, 4, 1, 0),
    refused("best_of", "vLLM, llama.cpp", _BEAMS, 2, 1, on="chat"),
    same("best_of", "vLLM", 2, on="completions"),
    refused("best_of", "vLLM, llama.cpp", "A response has one choice. Omit it.", 2, 1,
            on="responses"),
    ignored("length_penalty", "vLLM, text-generation-webui",
            "it only has an effect with beam search", 0.8),
    ignored("early_stopping", _WORDS, "it only has an effect with beam search", True),
    refused("t_max_predict_ms", "llama.cpp", "Send 'max_tokens'.", 500,
            lambda value: isinstance(value, int) and value <= 0),
    refused("n_indent", "llama.cpp", "Send a 'grammar'.", 4, 0),
    refused("lora", "llama.cpp", "Start the engine with the adapters.", [{"id": 0, "scale": 1}],
            []),
    refused("speculative_ngram", _WORDS, "Omit it.", True, False),
)  # fmt: skip
