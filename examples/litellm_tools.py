"""LiteLLM with a local server: a loop in which the model calls a tool, the first time by force.

ratoon serve smollm2-135m
pip install litellm mcp
python examples/litellm_tools.py
"""

from __future__ import annotations

import argparse
import json

import litellm

PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Tokyo"]}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS},
    }
]


def weather(city: str) -> str:
    print(f"weather({city!r})")
    return f"{city}: 18 degrees, light rain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    messages = [{"role": "user", "content": "What is the weather in Tokyo?"}]
    tool_choice = "required"
    for _ in range(4):
        answer = litellm.completion(
            model=f"openai/{args.model}",
            api_base=args.url,
            api_key="none",
            messages=messages,
            tools=TOOLS,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        tool_choice = "auto"
    print(messages[-1]["content"])


if __name__ == "__main__":
    main()
