"""Small agents on other projects' frameworks, each with a tool that adds: `python agent_clients.py NAME` in `.clients`.

They find the endpoint in OPENAI_BASE_URL or ANTHROPIC_BASE_URL, as their libraries do, and print what came out.
"""

from __future__ import annotations

import os
import sys
from typing import Any

QUESTION = "What is 40 + 2?"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def openai_agents(api: str, **options: Any) -> Any:
    from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_default_openai_api

    set_default_openai_api("responses" if api == "responses" else "chat_completions")
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False) if api == "forced" else ModelSettings()
    agent = Agent(name="sums", instructions="Be brief.", model="policy", tools=[function_tool(add)])
    agent.model_settings = forced
    config = RunConfig(tracing_disabled=True)
    return Runner.run_sync(agent, QUESTION, run_config=config, **options).final_output


def langchain(model: Any) -> Any:
    from langchain_core.tools import tool
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(model, [tool(add)])
    return agent.invoke({"messages": [("system", "Be brief."), ("user", QUESTION)]})["messages"][-1].text


def langchain_openai(**options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return langchain(ChatOpenAI(model="policy", **options))


def langchain_anthropic() -> Any:
    from langchain_anthropic import ChatAnthropic

    return langchain(ChatAnthropic(model="policy", max_tokens=200))


def langchain_structured() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="policy").with_structured_output(_answer(), method="function_calling").invoke(QUESTION)


def pydantic_ai(model: str) -> Any:
    from pydantic_ai import Agent

    return Agent(model, instructions="Be brief.", output_type=_answer(), tools=[add]).run_sync(QUESTION).output


def smolagents() -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("policy", os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return ToolCallingAgent([tool(add)], model, max_steps=3, verbosity_level=0).run(QUESTION)


def instructor() -> Any:
    from instructor import from_openai
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": QUESTION}]
    return from_openai(OpenAI()).chat.completions.create(model="policy", response_model=_answer(), messages=messages)


def anthropic_runner() -> Any:
    from anthropic import Anthropic, beta_tool

    def in_words(a: int, b: int) -> str:
        return str(add(a, b))

    runner: Any = Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=200,
        tools=[beta_tool(in_words, name="add", description="Adds two numbers.")],
        messages=[{"role": "user", "content": QUESTION}],
    )
    return [message.content for message in runner][-1][0].text


def _answer() -> Any:
    from pydantic import BaseModel

    class Answer(BaseModel):
        """The answer."""

        value: int

    return Answer


CLIENTS = {
    "openai-agents": lambda: openai_agents("chat"),
    "openai-agents, forced call": lambda: openai_agents("forced"),
    "openai-agents, Responses": lambda: openai_agents("responses"),
    "openai-agents, history left to the server": lambda: openai_agents("responses", auto_previous_response_id=True),
    "LangGraph": langchain_openai,
    "LangGraph, Responses": lambda: langchain_openai(use_responses_api=True),
    "LangGraph, Responses, history left to the server": lambda: langchain_openai(use_previous_response_id=True),
    "LangGraph, Messages": langchain_anthropic,
    "LangChain, typed answer": langchain_structured,
    "pydantic-ai, typed answer": lambda: pydantic_ai("openai-chat:policy"),
    "pydantic-ai, Responses, typed answer": lambda: pydantic_ai("openai-responses:policy"),
    "smolagents": smolagents,
    "instructor, typed answer": instructor,
    "anthropic's tool runner": anthropic_runner,
}

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]]())
