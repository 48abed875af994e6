"""Agents on other projects' frameworks, and coding agents as they are published, play an episode at the proxy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_clients import CLIENTS
from chat_templates import renderer
from fake_policy import assert_token_exact, parts_of
from proxy_rig import Rig, rig

from roll_like.inference.interface import GenerateRequest, Sampling

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".clients"
COMMANDS = FOLDER / "node_modules" / ".bin"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / ".setup-stamp").exists(), reason="make clients installs them"),
]


def calls(tool: str, arguments: Mapping[str, Any], then: str) -> Callable[[GenerateRequest], str]:
    """A policy that calls a tool once, where it is shown that, and then says something, or calls the next."""
    call, render = written(tool, arguments), renderer("Qwen2.5")

    def says(request: GenerateRequest) -> str:
        prompt = render.decode(request.prompt_ids)
        called = json.dumps(arguments) in prompt or str(arguments) in prompt
        return f"Let me see.\n{call}" if f'"name": "{tool}"' in prompt and not called else then

    return says


def written(tool: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def played(each: Rig, command: Sequence[str], folder: Path, **variables: str) -> str:
    """Run an agent against the rig's endpoint; return what it printed."""
    url = each.episode.base_url
    environment = {
        **{key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LD_LIBRARY_PATH")},
        "HOME": str(folder),
        "NO_PROXY": "127.0.0.1",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": each.episode.key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": each.episode.key,
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 300)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, (output + errors).decode()[-3000:]
    return output.decode()


#: Calls that hold a framework's final answer.
TYPED = {
    "LangChain, typed answer": "Answer",
    "instructor, typed answer": "Answer",
    "pydantic-ai, typed answer": "final_result",
    "pydantic-ai, Responses, typed answer": "final_result",
}


@pytest.mark.parametrize("name", list(CLIENTS))
async def test_frameworks(name: str, tmp_path: Path) -> None:
    says = calls("add", {"a": 40, "b": 2}, then="It is 42.")
    if name in TYPED:
        says = calls("add", {"a": 40, "b": 2}, then=written(TYPED[name], {"value": 42}))
    elif name == "smolagents":
        says = calls("add", {"a": 40, "b": 2}, then=written("final_answer", {"answer": "It is 42."}))
    async with rig(says, render=renderer("Qwen2.5"), tokens=8000, sampling=Sampling(max_tokens=500)) as each:
        program = [str(FOLDER / "bin" / "python"), str(Path(__file__).with_name("agent_clients.py")), name]
        assert "42" in (await played(each, program, tmp_path)).splitlines()[-1]
        each.episode.add_reward(1.0, None)
        scored = each.episode.scored()
    assert_token_exact(scored, each.policy)
    if TYPED.get(name) == "Answer":  # these have no tool but their answer
        assert scored.details["turns"] == 1
    else:
        assert scored.details["turns"] == 2
        call = scored.record[0].tool_calls[0]
        assert (call["name"], call["arguments"]) == ("add", {"a": 40, "b": 2})
        # smolagents shows results as a text of the user
        assert name == "smolagents" or "42" in call["result"]
    # smolagents shows the policy its calls as text
    assert len(parts_of(scored)) == (2 if name == "smolagents" else 1)
    forced = any(word in name for word in ("typed", "forced", "smolagents"))
    assert (scored.details["ignored_options"] > 0) == forced


@dataclass(frozen=True)
class CodingAgent:
    """How a coding agent is told what to do, and what its tool for commands is called."""

    command: tuple[str, ...]
    tool: str
    argument: str
    variables: Mapping[str, str]
    files: Mapping[str, str]
    sequences: int = 1


TASK = "Write hello into the file out.txt."
RUNS = "echo hello > out.txt && cat out.txt"
CODING_AGENTS = {
    "claude": CodingAgent(
        ("-p", TASK, "--dangerously-skip-permissions"),
        "Bash",
        "command",
        {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        {},
    ),
    "codex": CodingAgent(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        "exec_command",
        "cmd",
        {},
        {
            ".codex/config.toml": 'model = "policy"\nmodel_provider = "run"\n[model_providers.run]\nname = "run"\n'
            'base_url = "{url}"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        },
    ),
    "opencode": CodingAgent(
        ("run", TASK),
        "bash",
        "command",
        {},
        {
            ".config/opencode/opencode.json": json.dumps(
                {
                    "model": "run/policy",
                    "autoupdate": False,
                    "provider": {
                        "run": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "{url}", "apiKey": "{env:OPENAI_API_KEY}"},
                            "models": {"policy": {}},
                        }
                    },
                }
            )
        },
        sequences=2,  # it has the policy name the conversation first
    ),
    "qwen": CodingAgent(
        ("--auth-type", "openai", "-y", "-p", TASK), "run_shell_command", "command", {"OPENAI_MODEL": "policy"}, {}
    ),
}


@pytest.mark.parametrize("name", list(CODING_AGENTS))
async def test_coding_agents(name: str, tmp_path: Path) -> None:
    if shutil.which("node") is None or not (COMMANDS / name).exists():
        pytest.skip(f"make clients installs {name} where npm is installed")
    agent = CODING_AGENTS[name]
    arguments = {agent.argument: RUNS, **({"description": "Says hello."} if agent.tool != "exec_command" else {})}
    says = calls(agent.tool, arguments, then="It is written.")
    async with rig(says, render=renderer("Qwen2.5"), tokens=60000, sampling=Sampling(max_tokens=2000)) as each:
        for path, content in agent.files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content.replace("{url}", each.episode.base_url))
        output = await played(each, [str(COMMANDS / name), *agent.command], tmp_path, **agent.variables)
        each.episode.add_reward(1.0, None)
        scored = each.episode.scored()
    assert "It is written." in output
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert_token_exact(scored, each.policy)
    assert len(parts_of(scored)) == agent.sequences
    assert [call["name"] for record in scored.record for call in record.tool_calls] == [agent.tool]


#: Ends an episode of mini-swe-agent.
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.parametrize("wrong", [False, True], ids=["", "and an answer without a command"])
@pytest.mark.parametrize("model", ["litellm", "litellm_response", "litellm_textbased"])
async def test_mini_swe_agent(model: str, wrong: bool, tmp_path: Path) -> None:
    def runs(command: str) -> str:
        if model == "litellm_textbased":
            return f"Let me see.\n```mswea_bash_command\n{command}\n```"
        return f"Let me see.\n{written('bash', {'command': command})}"

    says = [runs(RUNS), *(["I do not know."] if wrong else []), runs(SUBMIT)]
    config = "mini_textbased.yaml" if model == "litellm_textbased" else "mini.yaml"
    options = ["-m", "openai/policy", "--model-class", model, "-c", config, "-y", "--exit-immediately", "-t", TASK]
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    async with rig(*says, render=renderer("Qwen2.5"), tokens=20000, sampling=Sampling(max_tokens=2000)) as each:
        await played(each, [str(FOLDER / "bin" / "mini"), *options], tmp_path, **variables)
        each.episode.add_reward(1.0, None)
        scored = each.episode.scored()
    assert (tmp_path / "out.txt").read_text() == "hello\n"
    assert_token_exact(scored, each.policy)
    assert len(parts_of(scored)) == 1 + wrong  # it drops an answer that it cannot read from the history
    assert scored.details["ignored_options"] == 0
    calls_made = [call["arguments"]["command"] for record in scored.record for call in record.tool_calls]
    assert calls_made == ([] if model == "litellm_textbased" else [RUNS, SUBMIT])


#: Environment of the example `atropos_sums.py`, what the policy says, and the score.
ATROPOS = [
    ("Sums", ["42"], 1.0),
    ("Sums", ["I do not know"], -1.0),
    ("Guesses", ["41", "47"], 1.0),
    ("Guesses", ["47", "41"], 0.0),
]


@pytest.mark.parametrize(("name", "says", "score"), ATROPOS)
async def test_an_environment_of_atropos(name: str, says: list[str], score: float, tmp_path: Path) -> None:
    program = [str(FOLDER / "bin" / "python"), str(ROOT / "examples" / "shared_environments" / "atropos_episode.py")]
    tokenizer = str(ROOT / ".tokenizers" / "qwen2_5")
    variables = {"ROLL_LIKE_SEED": "12", "HF_HUB_OFFLINE": "1"}
    async with rig(*says, render=renderer("Qwen2.5")) as each:
        await played(each, [*program, f"atropos_sums:{name}", tokenizer], tmp_path, **variables)
        scored = each.episode.scored()
    assert scored.reward == score
    # the seed decides the task: row 12 of 10, or the first draw
    assert ("40 + 2" if name == "Sums" else "40 + 7") in str(scored.record[0].shown)
    assert_token_exact(scored, each.policy)
    assert (scored.details["turns"], len(parts_of(scored))) == (len(says), 1)
