"""Serve OpenAI's API in front of a llama-server that you already run.

llama-server -m model.gguf --port 8080
python examples/in_front_of_llama_server.py http://127.0.0.1:8080
"""

import sys

import uvicorn
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_server import LlamaServer

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
port = int(sys.argv[2]) if len(sys.argv) > 2 else 8000
app = OpenAIAdapter(LlamaServer(address), model_names=["gpt-4o-mini"])

if __name__ == "__main__":
    uvicorn.run(app, port=port)
