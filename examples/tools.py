"""Let the model call a tool, send it the result, and print its answer.

latimer serve
python examples/tools.py http://127.0.0.1:8000/v1
"""

import json
import sys
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

TOOLS: list[ChatCompletionFunctionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def get_weather(city: str) -> dict[str, int]:
    """Return the temperature in a city, from a small table."""
    return {"temp_c": {"Paris": 21, "Rome": 27}.get(city, 15)}


with OpenAI(base_url=base_url, api_key="unused") as client:
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    while True:
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, temperature=0, max_tokens=200
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.to_dict())
        for call in message.tool_calls:
            assert call.type == "function"
            print(f"{call.function.name}({call.function.arguments})")
            result = json.dumps(get_weather(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)
