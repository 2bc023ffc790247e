"""Fields of other servers about caches, models and operation, and Ollama's options."""

from __future__ import annotations

from .ends import most_tokens
from .fields import Field, ignored, inside, mapped, refused, same

_CACHE = "a cache does not change the answer"
_LOADED = "the engine has already loaded its model"
_QUEUE = "it only affects the order of requests"
_ROUTE = "only `model` selects the engine"
_RECORD = "it only identifies or logs requests"
_WEBUI = "text-generation-webui"

# Ollama's options with the names and meanings of Latimer's fields.
_ALIKE = {
    "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "seed": 7,
    "stop": ["5"], "repeat_penalty": 1.1, "repeat_last_n": 128, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2,
}  # fmt: skip
# Ollama's options for loading a model.
_LOADING = {
    "num_batch": 64, "num_gpu": 1, "main_gpu": 0, "num_thread": 2, "num_keep": 5, "numa": True,
    "low_vram": True, "f16_kv": True, "vocab_only": False, "use_mmap": True, "use_mlock": True,
    "draft_num_predict": 4,
}  # fmt: skip

FIELDS: tuple[Field, ...] = (
    ignored("cache_prompt", "llama.cpp", _CACHE, False),
    ignored("n_cache_reuse", "llama.cpp", _CACHE, 64),
    ignored("id_slot", "llama.cpp", _CACHE, 0),
    ignored("slot_id", "llama.cpp", _CACHE, 0),
    ignored("cache_salt", "vLLM", "the server decides which API keys share a prompt cache", "salt"),
    ignored("kv_transfer_params", "vLLM", _CACHE, {"a": 1}),
    ignored("ec_transfer_params", "vLLM", _CACHE, {"a": 1}),
    ignored("priority", "vLLM", _QUEUE, 1),
    ignored("request_id", "vLLM", _RECORD, "r1"),
    ignored("rid", "SGLang", _RECORD, "r1"),
    ignored("session_id", "vLLM, OpenRouter", _RECORD, "s1"),
    ignored("trace", "OpenRouter", _RECORD, {"id": "t1"}),
    ignored("genkey", "koboldcpp", _RECORD, "KCPP1"),
    ignored("quiet", "koboldcpp", _RECORD, True),
    ignored("keep_alive", "Ollama", _LOADED, "5m"),
    ignored("ttl", "LM Studio", _LOADED, 300),
    ignored("draft_model", "LM Studio", "a draft model does not change the answer", "small"),
    ignored("api_type", _WEBUI, _ROUTE, "vllm"),
    ignored("api_server", _WEBUI, _ROUTE, "http://127.0.0.1"),
    ignored("legacy_api", _WEBUI, _ROUTE, False),
    ignored("models", "OpenRouter", _ROUTE, ["a/b"]),
    ignored("route", "OpenRouter", _ROUTE, "fallback"),
    ignored("provider", "OpenRouter", _ROUTE, {"sort": "price"}),
    refused("preset", "OpenRouter", "Send the fields of the preset.", "mine", ""),
    refused("plugins", "OpenRouter", "Send 'tools'.", [{"id": "web"}], []),
    ignored("image_config", "OpenRouter", "replies have no images", {"aspect_ratio": "1:1"}),
    ignored("using_openai_tools", "koboldcpp", "`tools` are always used", True),
    mapped("options", "Ollama", "the fields below", {"num_ctx": 2048}, inside, {}),
    *(same(f"options.{name}", "Ollama", example) for name, example in _ALIKE.items()),
    mapped("options.num_predict", "Ollama", "`max_tokens`", 20, most_tokens),
    ignored("options.num_ctx", "Ollama", "a prompt is never cut: one that does not fit is a 400",
            2048),
    mapped("options.tfs_z", "Ollama", "`tfs`", 0.9, None, 1),
    refused("options.penalize_newline", "Ollama", "Omit it.", False, True),
    *(ignored(f"options.{name}", "Ollama", _LOADED, example) for name, example in _LOADING.items()),
)  # fmt: skip
