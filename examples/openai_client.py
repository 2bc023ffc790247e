"""Stream a chat completion from a running Latimer with the official `openai` client.

latimer serve
python examples/openai_client.py http://127.0.0.1:8000/v1
"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
api_key = sys.argv[2] if len(sys.argv) > 2 else "unused"

with OpenAI(base_url=base_url, api_key=api_key) as client:
    model = client.models.list().data[0].id
    question = "What is the capital of France?"
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
