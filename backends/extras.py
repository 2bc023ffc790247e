"""The sampling extras of llama.cpp, which several engines support."""

from __future__ import annotations

# The hint for `min_tokens` where an engine cannot ban end tokens for a part of the answer.
ALWAYS_OR_NEVER = "It can only ban end tokens for the whole answer: send 'ignore_eos'."

# The extras by their names in requests.
LLAMA_CPP_EXTRAS = frozenset(
    {
        "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
        "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "repeat_penalty", "repeat_last_n", "ignore_eos",
    }
)  # fmt: skip
