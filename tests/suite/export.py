"""Write the demo model as safetensors, with its tokenizer, for servers that do not read GGUF.

    PYTHON export.py DEMO.gguf FOLDER

PYTHON is that of an environment with torch, transformers, gguf and accelerate. The weights are
those of the GGUF file in float32. A model that was loaded from a quantized file refuses to be
saved, so a new one gets its weights.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(source: Path, folder: Path) -> None:
    """Write the model and its tokenizer."""
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
