"""What an agentic configuration refuses, what its check finds in environments, and the plan of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from config_files import MINIMAL_AGENTIC, changed, refused, write
from gymnasium.envs.registration import EnvSpec

from roll_like import cli
from roll_like.builtin.pipelines.agentic.check import environment_findings
from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.agentic.pipeline import AgenticPipeline
from roll_like.check import Report
from roll_like.check.plan import plan
from roll_like.types import EVALUATION_SEED

LAKE: dict[str, Any] = {"id": "roll_like/FrozenLake-v0", "kwargs": {"size": 3}}


def config(**changes: Any) -> AgenticConfig:
    return AgenticConfig.from_values(changed(MINIMAL_AGENTIC, **changes))


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"environments": []}, "environments", "at least 1 item"),
        (
            {"rollout__episodes_per_step": 30},
            "rollout",
            "episodes_per_step is 30, but groups_per_step × episodes_per_group = 8 × 4 = 32",
        ),
        ({"environments": [LAKE, LAKE]}, "environments", "two environments are called 'FrozenLake'"),
        (
            {"environments": [LAKE], "evaluation": {"environments": [{"id": "roll_like/FrozenLake-v0"}]}},
            "evaluation.environments.0.name",
            "'FrozenLake' is also what an environment with other settings is called",
        ),
        ({"rollout__max_response_tokens": 4096}, "rollout.max_response_tokens", "would fill the whole conversation"),
        (
            {"evaluation": {"max_response_tokens": 5000}},
            "evaluation.max_response_tokens",
            "one turn of 5000 tokens would fill the whole conversation (rollout.max_episode_tokens: 4096)",
        ),
        (
            {"evaluation": {"first_seed": 40, "seeds": 16}},
            "evaluation.first_seed",
            "the seeds 40 to 55 of 'FrozenLake' are also trained on (0 to 79); use others",
        ),
        ({"algorithm": {"advantage": "remax"}}, "algorithm.advantage.type", "episodes have none; use grpo, rloo"),
        ({"env_workers__workers": 0}, "env_workers.workers", "greater than or equal to 1"),
        ({"rewards": {"environment_weight": 0.5}}, "rewards.environment_weight", "there are no rewards beside"),
        ({"rewards": {"timeout_seconds": 5}}, "rewards.timeout_seconds", "add `rewards.use`, or remove this"),
        (
            {"rewards": {"use": [{"type": "repetition", "name": "return"}]}},
            "rewards.use.0",
            "own reward is",
        ),
        ({"rewards": {"use": ["repetition", "repetition"]}}, "rewards.use", "two rewards are called 'repetition'"),
        (
            {"rewards": {"use": [{"type": "repetition", "sources": ["Lake"]}]}},
            "rewards.use.0.sources",
            "no environment is called 'Lake'; known: FrozenLake",
        ),
        (
            {"rewards": {"environment_weight": 0, "use": [{"type": "repetition", "weight": 0}]}},
            "rewards.environment_weight",
            "no reward with a weight scores 'FrozenLake'",
        ),
        (
            {"rewards": {"use": ["repetition"], "pools": {"a": {"rewards": ["math"]}}}},
            "rewards.pools.a.rewards.0",
            "math",
        ),
        ({"judge": {"path": "org/judge"}}, "judge", "a judge would be loaded and never called"),
        ({"rewards": {"environment_weight": -1}}, "rewards.environment_weight", "greater than or equal to 0"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], key: str, expected: str) -> None:
    found = refused(config, **changes)
    text = found.get(key, "") + "".join(message for message in found.values() if key.rpartition(".")[2] in message)
    assert expected in text, found


def test_seeds_that_end_before_the_evaluations_are_fine() -> None:
    assert config(environments=[{**LAKE, "seeds": 40}], evaluation={"first_seed": 40, "seeds": 16})
    assert config(environments=[{**LAKE, "first_seed": 100}], evaluation={"first_seed": 0, "seeds": 100})


def test_the_plan_counts_episodes_and_windows() -> None:
    one = config(env_workers__workers=3, rollout__max_episode_tokens=640)
    assert (one.longest_sample, one.context_window, one.seeds_played) == (640, 640, 80)
    found = plan(one)
    assert (found.groups_per_step, found.samples_per_group, found.units) == (8, 4, ("groups", "episodes"))
    assert found.processes == (("environment workers", 3),)


# environments, as `--check` begins them


class Numbers(gymnasium.Env[int, int]):
    """Not text."""

    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(2)


class Falling(gymnasium.Env[str, str]):
    """Cannot begin."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        raise RuntimeError(f"no map for {seed}")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, environment in (("Numbers", Numbers), ("Falling", Falling)):
        spec = EnvSpec(f"strange/{name}-v0", entry_point=environment)
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)


def findings(tiny_model: Path, **changes: Any) -> Report:
    return AgenticPipeline.check(config(model={"path": str(tiny_model)}, **changes))


def only_error(report: Report) -> str:
    [finding] = report.errors
    return str(finding)


def test_a_good_configuration_has_no_findings(tiny_model: Path) -> None:
    small = {"groups_per_step": 8, "episodes_per_group": 4, "max_response_tokens": 16, "max_episode_tokens": 1000}
    assert findings(tiny_model, environments=[LAKE], rollout=small, algorithm={"loss": "reinforce"}).findings == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"id": "roll_like/FrozenLak-v0"}, "roll_like/FrozenLake-v0"),
        ({"id": "CartPole-v9"}, "CartPole-v1"),
        ({"id": "roll_like/FrozenLake-v0", "kwargs": {"sise": 3}}, "size"),
        ({"id": "strange/Numbers-v0"}, "DiscreteActions"),
        ({"id": "strange/Falling-v0", "first_seed": 7}, "reset(7) of 'strange/Falling-v0' fails: RuntimeError: no map"),
        ({"id": "roll_like/QA-v0", "kwargs": {"path": "nowhere.jsonl"}}, "nowhere.jsonl"),
    ],
)
def test_an_environment_that_cannot_be_played_says_why(
    tiny_model: Path, environment: dict[str, Any], expected: str
) -> None:
    short = {"groups_per_step": 8, "episodes_per_group": 4, "max_response_tokens": 16, "max_episode_tokens": 1000}
    message = only_error(findings(tiny_model, environments=[environment], rollout=short))
    assert message.startswith("error: environments.0")
    assert expected in message


def test_a_first_prompt_that_does_not_fit_is_found(tiny_model: Path) -> None:
    rollout = {"groups_per_step": 8, "episodes_per_group": 4, "max_response_tokens": 16, "max_episode_tokens": 40}
    assert "a conversation 40 at most, so no turn could be taken" in only_error(
        findings(tiny_model, environments=[LAKE], rollout=rollout)
    )


def test_the_command_line_checks_agentic_files(
    tmp_path: Path, tiny_model: Path, recording_pipeline: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    values = changed(
        MINIMAL_AGENTIC,
        model={"path": str(tiny_model)},
        environments=[LAKE],
        rollout__max_episode_tokens=1000,
        output_dir=str(tmp_path / "runs"),
    )
    assert cli.main(["run", "--config", str(write(tmp_path / "a.yaml", values)), "--check"]) == 0
    captured = capsys.readouterr()
    assert "episodes per step" in captured.out
    assert "8 groups × 4 = 32" in captured.out
    assert recording_pipeline.calls == []


JUDGED: dict[str, Any] = {
    "environment_weight": 0.5,
    "use": [
        {"type": "repetition", "weight": 0.1, "sources": ["FrozenLake"]},
        {"type": "llm_judge", "judges": [{"url": "judge", "model": "judge"}]},
    ],
    "pools": {"slow": {"rewards": ["llm_judge"], "workers": 2}},
}


def test_rewards_and_a_judge_are_part_of_the_plan_and_nothing_is_without() -> None:
    made = config(rewards=JUDGED, judge={"path": "org/judge"})
    assert made.rewards.environment_weight == 0.5
    assert "judge" in [role.name for role in made.roles]
    assert made.processes == {"environment workers": 1, "reward workers": 3}
    plain = config()
    assert "judge" not in [role.name for role in plain.roles]
    assert (plain.rewards.use, plain.processes) == ((), {"environment workers": 1})
    assert AgenticConfig.from_values(plain.model_dump(mode="json", by_alias=True)) == plain  # as a run writes it


def test_the_check_makes_rewards_and_finds_those_that_need_a_row() -> None:
    made = config(rewards={"use": ["math", "repetition", {"type": "exact_match", "weight": 0.1}]})
    findings = {one.key: one for one in environment_findings(made, None)}
    assert set(findings) == {"rewards.use.0", "rewards.use.2"}
    assert "needs the field 'answer', and episodes of 'FrozenLake' have only 'environment' and 'seed'" in str(
        findings["rewards.use.0"]
    )
    assert findings["rewards.use.2"].level == "error"


def test_a_reward_is_not_asked_about_environments_that_it_does_not_score() -> None:
    other = {"id": "roll_like/FrozenLake-v0", "name": "other"}
    made = config(environments=[LAKE, other], rewards={"use": [{"type": "math", "sources": ["other"]}]})
    (finding,) = environment_findings(made, None)
    assert "episodes of 'other'" in finding.message


@pytest.mark.parametrize(
    ("trained", "evaluation", "expected"),
    [
        ({"held_out": 3}, {}, None),
        ({}, {}, ("warning", "environments.0.kwargs", "evaluations set rows of")),
        ({"held_out": 3}, {"held_out": 2}, None),
        ({"held_out": 3}, {"held_out": 4}, ("error", "evaluation.environments.0.kwargs.held_out", "holds out 3 rows")),
        ({"held_out": 3}, {"held_out": 0}, ("warning", "evaluation.environments.0.kwargs", "are trained on too")),
        ({"held_out": 3}, {"first_seed": 500}, ("error", "evaluation.first_seed", "by seeds from 1000000 on")),
        ({}, {"path": "other.jsonl"}, None),
    ],
)
def test_rows_that_are_evaluated_are_not_trained_on(
    trained: dict[str, Any],
    evaluation: dict[str, Any],
    expected: tuple[str, str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "other.jsonl"):
        Path(name).write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(9)))
    section: dict[str, Any] = {"seeds": 2, "first_seed": evaluation.get("first_seed", EVALUATION_SEED)}
    if kwargs := {key: value for key, value in evaluation.items() if key != "first_seed"}:
        section["environments"] = [{"id": "roll_like/QA-v0", "name": "m", "kwargs": {"path": "rows.jsonl", **kwargs}}]
    qa = {"id": "roll_like/QA-v0", "kwargs": {"path": "rows.jsonl", **trained}}
    made = config(environments=[qa], evaluation=section)
    found = list(environment_findings(made, None))
    assert [(one.level, one.key) for one in found] == ([] if expected is None else [expected[:2]])
    assert expected is None or expected[2] in found[0].message
