"""One episode of tau2-bench: the policy is its agent, another model its user and its judge, and its evaluator rewards.

Python of an environment that has tau2: README.md. Nothing of roll_like is imported.
"""

import argparse
import json
import os
import urllib.request

from tau2.data_model.simulation import TerminationReason, TextRunConfig
from tau2.evaluator import evaluator_nl_assertions
from tau2.runner import build_text_orchestrator, get_tasks, run_simulation

parser = argparse.ArgumentParser()
parser.add_argument("domain")
parser.add_argument("--split", help="of the domain's tasks, such as train or test")
parser.add_argument("--user-model", required=True, help="as litellm names it, such as openai/user")
parser.add_argument("--user-url", required=True, help="OpenAI-compatible endpoint of the simulated user")
parser.add_argument("--user-key-variable", default="TAU2_USER_KEY", help="environment variable with its key")
parser.add_argument("--user-tokens", type=int, default=256, help="longest message of the simulated user")
parser.add_argument("--max-steps", type=int, default=60, help="messages of agent, user and tools together")
options = parser.parse_args()

url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
seed = int(os.environ["ROLL_LIKE_SEED"])
# named, so that nothing but the agent asks the policy: litellm takes OPENAI_BASE_URL where no address is given
other = {"api_base": options.user_url, "api_key": os.environ.get(options.user_key_variable, "none")}
evaluator_nl_assertions.DEFAULT_LLM_NL_ASSERTIONS = options.user_model
evaluator_nl_assertions.DEFAULT_LLM_NL_ASSERTIONS_ARGS = other

tasks = get_tasks(options.domain, task_split_name=options.split)
config = TextRunConfig(
    domain=options.domain,
    llm_agent="openai/policy",
    llm_args_agent={"api_base": url, "api_key": key, "num_retries": 0},
    llm_user=options.user_model,
    llm_args_user={**other, "max_tokens": options.user_tokens},
    max_steps=options.max_steps,
    seed=None,  # the run decides how the policy's tokens are drawn
)
orchestrator = build_text_orchestrator(config, tasks[seed % len(tasks)])
try:
    simulation = run_simulation(orchestrator)
    if simulation.termination_reason is TerminationReason.USER_ERROR:
        raise SystemExit("the simulated user wrote an empty message")  # a failed episode: the policy did nothing wrong
    reward = simulation.reward_info.reward
except ValueError:
    last = orchestrator.agent_state.messages[-1]
    if last.role != "assistant" or (last.content or "").strip() or last.tool_calls:
        raise
    reward = 0.0  # tau2 takes no empty message; one of the policy's is a mistake to learn from, and no failure
body = json.dumps({"reward": reward, "success": reward == 1.0}).encode()
urllib.request.urlopen(urllib.request.Request(url + "/reward", body, {"Authorization": f"Bearer {key}"}))
