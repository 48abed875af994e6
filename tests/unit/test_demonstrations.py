"""Demonstrations of rows: their tokens, what is refused, and how they join groups apart from the policy's samples."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from algorithm_samples import make_group
from config_files import changed
from test_config_check import lines
from test_rollout_scheduler import SAMPLING, FakeReplica
from tests_support import task as plain_task
from tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer

from roll_like.algorithms.advantages.base import flatten
from roll_like.algorithms.shaping import in_band, trained_on
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.rlvr.pipeline import RLVRPipeline
from roll_like.config.algorithm import DifficultyConfig, MaskConfig
from roll_like.config.demonstrations import DemonstrationsConfig, OffPolicyConfig
from roll_like.config.rollout import RolloutConfig
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, DataError
from roll_like.rollout.collection import Collected, collect_batch
from roll_like.rollout.demonstrations import DemonstrationsInGroups, TaskDemonstrations, off_policy_answers
from roll_like.rollout.metrics import off_policy_metrics, rollout_metrics
from roll_like.rollout.router import Router
from roll_like.rollout.scheduler import GenerateScheduler, GroupPlan
from roll_like.rollout.source import GroupFilter
from roll_like.rollout.storage import read_groups, write_groups
from roll_like.types import Failure, Group, Origin, Scored, Task, Trajectory
from roll_like.values import reduce

OFF_POLICY: dict[str, Any] = {"off_policy": {}}
THINKING = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>{% endif")
UNENDED = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def renderer(template: str = CHAT_TEMPLATE) -> Renderer:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def task_of(shown: Renderer, **fields: Any) -> Task:
    made = plain_task()
    prompt = shown.encode(shown.render(made.messages, ()))
    return replace(made, prompt_ids=prompt, metadata=fields)


def found(limit: int = 64, *, shown: Renderer | None = None, **section: Any) -> TaskDemonstrations:
    config = DemonstrationsConfig.model_validate({**OFF_POLICY, **section})
    return TaskDemonstrations(shown or renderer(), config, limit)


def test_a_demonstration_is_what_the_policy_would_sample() -> None:
    shown = renderer()
    task = task_of(shown, demonstration="A good answer.")
    (trajectory,) = found(shown=shown).of(task)
    prompt = len(task.prompt_ids)
    assert trajectory.token_ids[:prompt].tolist() == task.prompt_ids.tolist()
    response = trajectory.token_ids[prompt:]
    assert shown.decode(response) == "A good answer.<|im_end|>"
    assert response[-1] in shown.stop_ids
    # the text as the sampled ones, tokenised behind the prompt
    assert response[:-1].tolist() == shown.encode_pieces([("A good answer.", False)])[0].tolist()
    assert trajectory.sampled.tolist() == [False] * prompt + [True] * len(response)
    assert (trajectory.text, trajectory.origin) == ("A good answer.", Origin.DEMONSTRATION)
    assert (trajectory.segments, trajectory.policy_version, trajectory.logprobs.any()) == ((), 0, np.False_)
    assert trajectory.turns[prompt:].tolist() == [0] * len(response)


def test_several_demonstrations_of_a_row() -> None:
    shown = renderer()
    task = task_of(shown, good=["one", "two", "three"])
    both = found(shown=shown, field="good", off_policy={"samples_per_prompt": 2}).of(task)
    assert [each.text for each in both] == ["one", "two"]
    assert [each.sample_index for each in both] == [0, 1]
    assert [each.text for each in found(shown=shown, field="good", off_policy=None, sft={}).of(task)] == ["one"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"expected a demonstration in 'demonstration'.*there is no such field \(the row has none\)"),
        ({"demonstration": ""}, "found str ''"),
        ({"demonstration": " \n"}, "that are not empty"),
        ({"demonstration": None, "other": 1}, r"found NoneType None \(the row has 'demonstration', 'other'\)"),
        ({"demonstration": []}, r"found list \[\]"),
        ({"demonstration": ["good", ""]}, "a text or a list of texts that are not empty"),
        ({"demonstration": {"role": "assistant"}}, "found dict"),
        ({"demonstration": "word " * 40}, r"the demonstration has \d+ tokens, more than rollout.max_response_tokens"),
        ({"demonstration": "a<|im_end|>b"}, "spells '<|im_end|>', which ends an answer, before its end"),
    ],
)
def test_rows_without_one_that_can_be_used(fields: dict[str, Any], message: str) -> None:
    shown = renderer()
    task = task_of(shown, **fields)
    with pytest.raises(DataError, match=message) as caught:
        found(shown=shown).of(task)
    assert caught.value.message.startswith("fake.jsonl:1: ")
    assert caught.value.fix
    assert found(shown=shown, unusable="skip").of(task) == ()


def test_a_limit_is_met_to_the_token() -> None:
    shown = renderer()
    task = task_of(shown, demonstration="some words")
    length = len(found(shown=shown).of(task)[0].token_ids) - len(task.prompt_ids)
    assert found(length, shown=shown).of(task)
    with pytest.raises(DataError, match=rf"has {length} tokens, more than .* \({length - 1}\)"):
        found(length - 1, shown=shown).of(task)


def test_a_prompt_that_opens_reasoning_needs_reasoning() -> None:
    """The policy is asked after `<think>`: an answer without it is none that it could have given."""
    shown = renderer(THINKING)
    task = task_of(shown, demonstration="5", thought="<think>2 and 3</think>5")
    with pytest.raises(DataError, match=r"the prompt ends with .*<think>', and the chat template writes") as caught:
        found(shown=shown).of(task)
    assert "enable_thinking: false" in str(caught.value.fix)
    (trajectory,) = found(shown=shown, field="thought").of(task)
    response = trajectory.token_ids[len(task.prompt_ids) :]
    assert shown.decode(response) == "2 and 3</think>5<|im_end|>"


def test_a_template_that_changes_a_demonstration_is_refused() -> None:
    content = "message.content if message.role != 'assistant' else '<think></think>' + message.content | trim"
    shown = renderer(CHAT_TEMPLATE.replace("message.content", f"({content})"))
    for text, written in (("5", "<think></think>5"), (" 5", "<think></think>5")):
        with pytest.raises(DataError, match=f"writes the demonstration str '{text}' as str '{written}'") as caught:
            found(shown=shown).of(task_of(shown, demonstration=text))
        assert "as the template does, white space included" in str(caught.value.fix)
    trims = renderer(CHAT_TEMPLATE.replace("message.content", "message.content | trim"))
    for text in (" 5", "5\n", "\n5"):  # a prompt ends with a line break: it is no part of an answer
        with pytest.raises(DataError, match="the chat template writes the demonstration"):
            found(shown=trims).of(task_of(trims, demonstration=text))
    assert found(shown=trims).of(task_of(trims, demonstration="5"))


def test_a_template_that_ends_no_answer_is_refused() -> None:
    shown = renderer(UNENDED)
    task = task_of(shown, demonstration="good")
    with pytest.raises(DataError, match="the policy would learn not to stop"):
        found(shown=shown).of(task)


@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "qwen3"])
def test_real_templates(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / ".tokenizers" / name
    if not folder.is_dir():
        pytest.skip("make tokenizers brings it")
    from transformers import AutoTokenizer

    options = {"enable_thinking": False} if name == "qwen3" else {}
    shown = Renderer(AutoTokenizer.from_pretrained(folder), template_options=options)
    task = task_of(shown, demonstration="3 + 4 = <answer>7</answer>")
    (trajectory,) = found(shown=shown).of(task)
    response = trajectory.token_ids[len(task.prompt_ids) :]
    assert shown.decode(response) == "3 + 4 = <answer>7</answer><|im_end|>"
    assert trajectory.text == "3 + 4 = <answer>7</answer>"
    if name == "qwen3":  # which writes an empty reasoning where there is none
        thinks = Renderer(AutoTokenizer.from_pretrained(folder))
        with pytest.raises(DataError, match=r"writes the demonstration str '5' as str '<think>"):
            found(shown=thinks).of(task_of(thinks, demonstration="5"))
        answer = "<think>\n2 + 3\n</think>\n\n5"
        assert found(shown=thinks).of(task_of(thinks, demonstration=answer))[0].text == answer


# ---- in groups -----------------------------------------------------------------------------------


class Scorer:
    """Rewards by the text; what spells `lost` cannot be scored."""

    async def score(self, group: Group[Trajectory]) -> Group[Scored]:
        samples, failures = [], list(group.failures)
        for trajectory in group.samples:
            if trajectory.text == "lost":
                failures.append(Failure(stage="reward", name="toy", error="broken", origin=group.task.origin))
                continue
            value = float(trajectory.text == "right")
            samples.append(
                Scored(trajectory=trajectory, reward=value, rewards={"toy": value}, details={}, weights={"toy": 1.0})
            )
        return Group(task=group.task, samples=tuple(samples), failures=tuple(failures))


def sampled(demonstrations: Sequence[str], section: OffPolicyConfig, **plan: Any) -> Group[Scored]:
    """A group of two wrong samples (`ok`) that these demonstrations may join."""
    shown = renderer()
    task = task_of(shown, demonstration=list(demonstrations))
    config = DemonstrationsConfig(off_policy=section)
    joining = off_policy_answers(TaskDemonstrations(shown, config, 64), config, None)
    router = Router([FakeReplica()], max_running=9, max_in_flight=9, retries=0)
    made = GroupPlan(samples_per_group=2, sampling=SAMPLING, off_policy=joining, **plan)
    runner = GenerateScheduler(router, Scorer()).runner(made, 0)  # type: ignore[arg-type]
    tasks = itertools.repeat(task)
    collected: Collected = asyncio.run(asyncio.wait_for(collect_batch(runner, tasks, groups=1), timeout=60))
    return collected.groups[0]


def test_demonstrations_are_scored_and_stand_apart() -> None:
    group = sampled(["right", "wrong"], OffPolicyConfig(samples_per_prompt=2), baseline=SAMPLING)
    assert [one.reward for one in group.samples] == [0, 0]
    assert [one.reward for one in group.off_policy] == [1, 0]  # their rewards are verified, not taken for granted
    assert [one.trajectory.sample_index for one in (*group.samples, *group.baselines)] == [0, 1, 2]
    assert [one.trajectory.sample_index for one in group.off_policy] == [3, 4]
    assert [one.reward for one in group.whole.samples] == [0, 0, 1, 0]
    assert group.whole.off_policy == ()


def test_a_demonstration_that_cannot_be_scored_is_a_failure() -> None:
    group = sampled(["lost"], OffPolicyConfig())
    assert (group.off_policy, [failure.name for failure in group.failures]) == ((), ["toy"])
    assert len(group.samples) == 2
    # it is none of the policy's: one of three would be too many
    collected = Collected(groups=(group,), rejected=(), failures=group.failures, started=1, tokens=12)
    collected.refuse_too_many_failures(0.1, "step 1")
    metrics = rollout_metrics(collected, 0)
    assert (metrics["rollout/failures"].value, metrics["demonstrations/failures"].value) == (0, 1)


def test_only_unsolved_groups_are_joined() -> None:
    def joined(rewards: list[float], **section: Any) -> int:
        group = make_group(rewards)
        given = replace(group.samples[0], trajectory=replace(group.samples[0].trajectory, origin=Origin.DEMONSTRATION))
        config = OffPolicyConfig(only_unsolved=True, **section)
        return len(DemonstrationsInGroups(found(), config).join(group, [given]).off_policy)

    assert [joined([0, 0]), joined([0, 1]), joined([0.7 + 0.2 + 0.1, 0])] == [1, 0, 0]
    assert [joined([0.4, 0], solved_reward=0.5), joined([0.5, 0], solved_reward=0.5)] == [1, 0]


def with_demonstration(rewards: list[float], reward: float) -> Group[Scored]:
    group = make_group(rewards)
    trajectory = replace(group.samples[0].trajectory, origin=Origin.DEMONSTRATION, segments=(), sample_index=9)
    return replace(group, off_policy=(replace(group.samples[0], trajectory=trajectory, reward=reward),))


def test_filters_look_at_the_group_that_is_trained_on() -> None:
    keeps = GroupFilter(
        RolloutConfig(prompts_per_step=1, samples_per_prompt=2, drop_zero_variance_groups=True, max_oversampling=2.0)
    )
    assert keeps(with_demonstration([0, 0], 1))  # there is something to learn
    assert not keeps(with_demonstration([1, 1], 1))
    assert not keeps(replace(with_demonstration([0, 0], 1), samples=()))
    # how hard a task is, the policy's own samples tell
    band = DifficultyConfig(of="mean", low=0.0, high=0.1)
    assert in_band(with_demonstration([0, 0], 1).whole, band)


@pytest.mark.parametrize("origin", [Origin.DEMONSTRATION, Origin.REPLAYED])
def test_masks_count_the_policys_samples(origin: Origin) -> None:
    group = with_demonstration([0, 0, 0, 0], 1)
    joined = replace(group.off_policy[0], trajectory=replace(group.off_policy[0].trajectory, origin=origin))
    whole = replace(group, off_policy=(joined,)).whole
    chosen, figures = trained_on([whole], MaskConfig(samples_per_group=2))
    assert chosen == [True, True, False, False, True]
    assert reduce(figures) == {"mask/samples_per_group": 0.5}


def test_figures_of_rollouts_are_of_the_policys_samples() -> None:
    groups = (with_demonstration([0, 0], 1), with_demonstration([0, 1], 0), make_group([0, 0]))
    collected = Collected(groups=groups, rejected=(), failures=(), started=3, tokens=12)
    figures = reduce(rollout_metrics(collected, 5))
    assert figures["rollout/reward/mean"] == pytest.approx(1 / 6)
    assert figures["rollout/reward/pass"] == pytest.approx(1 / 3)
    assert figures["rollout/groups/zero_variance"] == pytest.approx(2 / 3)
    assert figures["rollout/samples"] == 6
    assert figures["staleness/max"] == 2  # of version 3, and a demonstration is of none
    added = reduce(off_policy_metrics(groups, 5, {Origin.DEMONSTRATION}))
    assert added == {"demonstrations/groups": pytest.approx(2 / 3), "demonstrations/reward": 0.5}
    assert off_policy_metrics(groups, 5, ()) == {}
    assert reduce(off_policy_metrics(groups[2:], 5, {Origin.DEMONSTRATION})) == {"demonstrations/groups": 0}


def test_files_of_rollouts_hold_them(tmp_path: Path) -> None:
    groups = [with_demonstration([0, 0], 1), make_group([1])]
    write_groups(tmp_path / "step", groups)
    back = read_groups(tmp_path / "step")
    assert [len(group.off_policy) for group in back] == [1, 0]
    trajectory = back[0].off_policy[0].trajectory
    assert (trajectory.origin, type(trajectory.origin)) == (Origin.DEMONSTRATION, Origin)
    assert len(flatten(back)) == 3
    assert len(flatten([group.whole for group in back])) == 4


# ---- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        *(
            (
                changed(demonstrations=OFF_POLICY, algorithm={"advantage": name}),
                "algorithm.advantage.type",
                f"'{name}' takes all samples of a group for the policy's own",
            )
            for name in ("opo", "maxrl", "grpo_passk", "optimal_token_baseline")
        ),
        (
            changed(demonstrations=OFF_POLICY, algorithm={"kl": {"use": "reward"}}, reference={}),
            "algorithm.kl.use",
            "demonstrations.off_policy adds answers that it did not sample",
        ),
        (
            changed(demonstrations=OFF_POLICY, algorithm={"loss": "raft"}),
            "algorithm.loss.type",
            "use demonstrations.sft",
        ),
        (
            changed(demonstrations={"sft": {}}, algorithm={"router_replay": True}),
            "algorithm.router_replay",
            "there are no experts to replay",
        ),
        (
            changed(demonstrations={"sft": {"warmup_steps": 10}}),
            "demonstrations.sft.warmup_steps",
            "would still grow when the run ends after 10 steps",
        ),
        (
            changed(experience_replay={}, algorithm={"correction": {"type": "none"}}),
            "algorithm.correction.type",
            "up to 100 steps old",
        ),
        (
            changed(experience_replay={}, algorithm={"loss": "gpg", "old_logprobs": "behaviour"}),
            "algorithm.old_logprobs",
            "which gpg does not use",
        ),
        (
            changed(experience_replay={}, algorithm={"advantage": "gae"}, critic={}),
            "algorithm.advantage.type",
            "experience_replay adds others",
        ),
        (
            changed(experience_replay={"samples_per_prompt": 9}),
            "experience_replay",
            "8 answers are kept of a prompt, fewer than the 9",
        ),
        (
            changed(
                experience_replay={"initial": "runs/x"}, data__sources=[{"path": "train.jsonl", "streaming": True}]
            ),
            "experience_replay.initial",
            "a streamed source is read row by row",
        ),
        (
            changed(experience_replay={}, rollout__schedule={"type": "replay", "path": "runs/x"}),
            "experience_replay",
            "a replay trains on the groups that were recorded",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RLVRConfig.model_validate(values)
    assert key in str(caught.value)
    assert message in str(caught.value)


JUDGES: dict[str, Any] = {"type": "llm_judge", "judges": [{"url": "http://x/v1", "model": "m"}]}
#: What looks at the samples of a group together, and what the trainer computes.
UNFIT: tuple[dict[str, Any], ...] = (
    {"type": "consensus"},
    {**JUDGES, "mode": "pairwise"},
    {"type": "confidence"},
    {"type": "reference_likelihood"},
)


@pytest.mark.parametrize("reward", UNFIT, ids=lambda reward: reward["type"])
@pytest.mark.parametrize("section", ["demonstrations", "experience_replay"])
def test_rewards_of_the_policys_samples_alone_are_refused(section: str, reward: dict[str, Any]) -> None:
    values: dict[str, Any] = {section: OFF_POLICY if section == "demonstrations" else {}}
    name = "demonstrations.off_policy" if section == "demonstrations" else section
    use = [{"type": "ifeval"}, reward]
    with pytest.raises(ConfigError, match=rf"rewards.use.1.*{reward['type']}.* or remove {name}"):
        RLVRConfig.model_validate(changed(**values, rewards={"use": use}))
    # without off-policy answers, or of other rows, they may be used
    RLVRConfig.model_validate(changed(demonstrations={"sft": {}}, rewards={"use": use}))
    RLVRConfig.model_validate(changed(**values, rewards={"use": [{"type": "ifeval"}, JUDGES]}))
    if reward["type"] == "consensus":
        elsewhere = {"every": 5, "sources": [{"name": "other", "path": "eval.jsonl"}]}
        use = [{"type": "ifeval"}, {**reward, "sources": ["other"]}]
        RLVRConfig.model_validate(changed(**values, rewards={"use": use}, evaluation=elsewhere))


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "gdpo", "gpg", "reinforce_plus_plus", "remax"])
def test_estimators_that_take_demonstrations(advantage: str) -> None:
    values = changed(
        demonstrations={**OFF_POLICY, "sft": {}},
        algorithm={"advantage": advantage},
        rollout__schedule={"type": "async"},
    )
    config = RLVRConfig.model_validate(values)
    assert config.off_policy_origins == {Origin.DEMONSTRATION}
    # a supervised loss needs no groups
    RLVRConfig.model_validate(changed(demonstrations={"sft": {}}, algorithm={"advantage": "gae"}, critic={}))


def test_check_reads_the_demonstrations_of_all_rows(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Say {n}.", "demonstration": f"{n}"} for n in range(8)]

    def errors(rows: list[dict[str, Any]], **section: Any) -> list[str]:
        lines(tmp_path / "train.jsonl", *rows)
        values = changed(
            model={"path": str(tiny_model)},
            rewards={"use": [{"type": "length", "max_tokens": 32, "buffer_tokens": 8}]},
            demonstrations={**OFF_POLICY, **section},
        )
        report = RLVRPipeline.check(RLVRConfig.model_validate(values))
        return [
            f"{one.level} {one.message}" for one in (*report.errors, *report.warnings) if one.key == "data.sources.0"
        ]

    assert errors(rows) == []
    bad = [*rows[:2], {"prompt": "Say 2."}, {"prompt": "Say 3.", "demonstration": "word " * 64}, *rows[4:]]
    (error,) = errors(bad)
    assert "train.jsonl:3: expected a demonstration" in error
    assert error.endswith("(and 1 more rows)")
    (warning,) = errors(bad, unusable="skip")
    assert warning.startswith("warning 2 of 8 prompts are trained on without a demonstration")
    (error,) = errors([{"prompt": f"Say {n}."} for n in range(8)], unusable="skip")
    assert error.startswith("error none of 8 rows has a demonstration")


def test_check_looks_for_the_run_whose_answers_are_replayed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "train.jsonl", *({"prompt": f"Say {n}."} for n in range(8)))
    values = changed(
        model={"path": str(tiny_model)},
        rewards={"use": [{"type": "length", "max_tokens": 32, "buffer_tokens": 8}]},
        experience_replay={"initial": "runs/none"},
    )
    keys = [error.key for error in RLVRPipeline.check(RLVRConfig.model_validate(values)).errors]
    assert keys == ["experience_replay.initial"]


def test_kept_demonstrations_are_those_of_the_task_that_asks() -> None:
    shown = renderer()
    tasks = [task_of(shown, demonstration="one"), replace(task_of(shown), task_id="fake/1")]
    demonstrations = found(shown=shown, unusable="skip")
    assert demonstrations.keep(tasks) == tasks[1:]
    again = replace(tasks[0])
    (trajectory,) = demonstrations.of(again)
    assert (trajectory.task is again, trajectory.text) == (True, "one")
    prompt = np.array([9, 9, 9], np.int32)  # of a recording with another prompt
    (other,) = demonstrations.of(replace(tasks[0], prompt_ids=prompt))
    assert other.token_ids[:3].tolist() == [9, 9, 9]
    assert (other.parts[0].prompt_length, shown.decode(other.token_ids[3:])) == (3, "one<|im_end|>")
    with pytest.raises(DataError, match="expected a demonstration"):
        found(shown=shown).keep(tasks)
