import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
from reward_support import make_group

from roll_like.config.rewards import RewardsConfig
from roll_like.errors import PluginError
from roll_like.registry import REWARDS
from roll_like.rewards.worker import RewardWorker, notebook_rewards

USER_MODULE = """
import threading

from roll_like import Completion, Reward, RewardConfig, RewardResult, register_reward


@register_reward("user_function")
def user_function(completion: Completion) -> float:
    return float(completion.text == completion.answer)


@register_reward("user_class")
class UserClass(Reward):
    class Config(RewardConfig):
        factor: float = 1.0

    def score(self, completions):
        return [RewardResult(self.config.factor * len(c.text), {"length": len(c.text)}) for c in completions]


RELEASED = threading.Event()


@register_reward("user_hang")
def user_hang(completion: Completion) -> float:
    RELEASED.wait(60)
    return 1.0
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    REWARDS.names()  # load what is installed, so that it survives the clean-up
    before = dict(REWARDS._plugins)
    (tmp_path / "my_own_rewards.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("my_own_rewards")  # as the driver does, to validate the settings
    yield "my_own_rewards"
    sys.modules.pop("my_own_rewards")
    REWARDS._plugins.clear()
    REWARDS._plugins.update(before)


def test_rewards_of_a_users_module(user_module: str) -> None:
    config = RewardsConfig.model_validate(
        {"use": [{"type": "user_function"}, {"type": "user_class", "factor": 2.0, "weight": 0.5, "name": "length"}]}
    )
    worker = RewardWorker(config, imports=(user_module,))
    scored = asyncio.run(worker.score(make_group("yes", "maybe", answer="yes")))
    assert [sample.reward for sample in scored.samples] == [1.0 + 3.0, 0.0 + 5.0]
    assert scored.samples[0].rewards == {"user_function": 1.0, "length": 6.0}
    assert scored.samples[1].details == {"length/length": 5.0}
    assert asyncio.run(worker.healthy())
    worker.close()


def test_settings_are_checked_with_the_plugins_own_config(user_module: str) -> None:
    with pytest.raises(ValueError, match="factr"):
        RewardsConfig.model_validate({"use": [{"type": "user_class", "factr": 2.0}]})
    with pytest.raises(ValueError, match="user_clas"):
        RewardsConfig.model_validate({"use": [{"type": "user_clas"}]})


def test_a_worker_with_a_hanging_reward_asks_to_be_replaced(user_module: str) -> None:
    config = RewardsConfig.model_validate({"use": [{"type": "user_hang"}], "timeout_seconds": 0.1, "retries": 1})
    worker = RewardWorker(config)
    scored = asyncio.run(worker.score(make_group("yes", answer="yes")))
    assert (len(scored.samples), len(scored.failures)) == (0, 1)
    assert not asyncio.run(worker.healthy())
    sys.modules[user_module].RELEASED.set()
    while not asyncio.run(worker.healthy()):
        time.sleep(0.01)


def test_a_module_that_cannot_be_imported() -> None:
    config = RewardsConfig.model_validate({"use": [{"type": "ifeval"}]})
    with pytest.raises(PluginError, match="'no_such_module'"):
        RewardWorker(config, imports=("no_such_module",))


def test_a_notebooks_reward_travels_by_value(user_module: str) -> None:
    code = USER_MODULE.replace('"user_', '"cell_')
    exec(code, {"__name__": "__main__"})
    config = RewardsConfig.model_validate({"use": ["cell_class", {"type": "cell_function"}, "user_class"]})
    plugins = notebook_rewards(config.use)  # type: ignore[arg-type]
    assert set(plugins) == {"cell_class", "cell_function"}
    sent = cloudpickle.dumps((config, plugins))
    del REWARDS._plugins["cell_class"], REWARDS._plugins["cell_function"]

    there, received = cloudpickle.loads(sent)
    scored = asyncio.run(RewardWorker(there, plugins=received).score(make_group("yes", answer="yes")))
    assert scored.samples[0].rewards == {"cell_class": 3.0, "cell_function": 1.0, "user_class": 3.0}


def test_worker_imports_neither_torch_nor_ray() -> None:
    code = "import roll_like, roll_like.rewards.worker, sys; from roll_like.registry import REWARDS; REWARDS.names(); "
    heavy = {"torch", "transformers", "ray", "vllm", "deepspeed", "sympy", "jsonschema", "httpx"}
    code += f"print({heavy!r} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
