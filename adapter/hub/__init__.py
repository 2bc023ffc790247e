"""Models by name: `hf:ORG/REPO[:QUANT][@REV]` and `hf:ORG/REPO/PATH.gguf[@REV]`."""
