"""LangChain with a local server: a forced tool call, its result, and an answer in a given form.

ratoon serve smollm2-135m
pip install langchain-openai
python examples/langchain_tools.py
"""

from __future__ import annotations

import argparse
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: Literal["Paris", "Rome", "Tokyo"]) -> str:
    """The weather in a city."""
    print(f"weather({city!r})")
    return f"{city}: 18 degrees, light rain"


class Forecast(BaseModel):
    degrees: int
    rain: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    model = ChatOpenAI(base_url=args.url, api_key="none", model=args.model, temperature=0, max_tokens=100)
    messages = [HumanMessage("What is the weather in Tokyo?")]

    # In a stream the call comes in pieces, which add up.
    caller = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    call = None
    for chunk in caller.stream(messages):
        call = chunk if call is None else call + chunk
    messages += [call, *(weather.invoke(one) for one in call.tool_calls)]
    print(model.bind_tools([weather]).invoke(messages).content)
    print(model.with_structured_output(Forecast, method="json_schema").invoke(messages))


if __name__ == "__main__":
    main()
