"""OpenAI's Agents SDK with a local server: an agent with a tool.

    ratoon serve smollm2-135m
    pip install openai-agents
    python examples/agents_sdk.py

The first call is forced, since the embedded model is too small to decide for one; then it answers with the result.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def weather(city: Literal["Paris", "Rome", "Tokyo"]) -> str:
    """The weather in a city."""
    print(f"weather({city!r})")
    return f"{city}: 18 degrees, light rain"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    set_tracing_disabled(True)  # traces would be sent to OpenAI
    model = OpenAIChatCompletionsModel(args.model, AsyncOpenAI(base_url=args.url, api_key="none"))
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=100)
    agent = Agent(name="Forecaster", model=model, tools=[weather], model_settings=settings)
    result = await Runner.run(agent, "What is the weather in Tokyo?")
    print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
