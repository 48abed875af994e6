"""A process reward model as a reward: steps of answers, what their scores come to, and models that are none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episodes import episode
from reward_support import completion, outcomes
from safetensors.torch import save_file
from test_rewards_reward_model import make_classifier
from tiny_model import VOCABULARY, make_tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForTokenClassification,
)

from roll_like import Completion, RewardResult, StepScore
from roll_like.builtin.rewards.process_steps import StepsConfig
from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig
from roll_like.errors import RewardError
from roll_like.rewards.base import given_completion
from roll_like.rewards.call import RewardCaller
from roll_like.rewards.scorer import to_completion

ANSWERS = ["Rain falls.\n\nIt is wet.\n\n", "A", "Bees and bees.\n\n\n\nRain.\n\nNumbers from one to twelve.", ""]
ENDS = [[13, 25], [1], [18, 25, 52], [0]]
GROUP = [completion(text, prompt="Tell me about rain.") for text in ANSWERS]
STEPS = [["Rain falls.", "It is wet."], ["A"], ["Bees and bees.", "Rain.", "Numbers from one to twelve."], [""]]


def make_process_model(directory: Path, *, labels: int = 1, **stated: Any) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        num_labels=labels,
        **stated,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = LlamaForTokenClassification(config)
        torch.nn.init.constant_(model.score.bias, 0.125)
        model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_process_model(tmp_path_factory.mktemp("process"), step_separator="\n\n")


def make(path: Path, steps: dict[str, Any] | None = None, **settings: Any) -> RewardModel:
    given = None if steps is None else StepsConfig(**steps)
    return RewardModel(RewardModelConfig(path=str(path), steps=given, **settings))


def results(reward: RewardModel, group: list[Completion] = GROUP) -> list[RewardResult]:
    found = outcomes(reward, group)
    assert all(isinstance(outcome, RewardResult) for outcome in found), found
    return [outcome for outcome in found if isinstance(outcome, RewardResult)]


def by_hand(path: Path, separator: str = "\n\n") -> list[list[list[float]]]:
    """The outputs at the ends of steps, as transformers computes them, one answer at a time without padding."""
    tokenizer = make_tiny_tokenizer()
    classifier = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for steps in STEPS:
        messages = [{"role": "user", "content": "Tell me about rain."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids, places = tokenizer(text, add_special_tokens=False)["input_ids"], []
        for step in steps:
            ids += tokenizer(step, add_special_tokens=False)["input_ids"]
            ids += tokenizer(separator, add_special_tokens=False)["input_ids"]
            places.append(len(ids) - 1)
        with torch.inference_mode():
            found.append(classifier(input_ids=torch.tensor([ids])).logits[0, places].tolist())
    return found


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_steps_are_scored_as_transformers_does_and_reduced(model: Path, batch_size: int) -> None:
    expected = [[sigmoid(score) for (score,) in of_one] for of_one in by_hand(model)]
    assert np.ptp([score for of_one in expected for score in of_one]) > 0.1  # else it would prove nothing
    reduced: dict[str, Callable[[list[float]], float]] = {
        "min": min,
        "last": lambda scores: scores[-1],
        "product": math.prod,
        "mean": lambda scores: sum(scores) / len(scores),
    }
    for reduce, apply in reduced.items():
        found = results(make(model, {"reduce": reduce}, batch_size=batch_size))
        assert [each.value for each in found] == pytest.approx([apply(scores) for scores in expected], abs=1e-5)
        assert [[step.end for step in each.steps] for each in found] == ENDS
        for each, scores in zip(found, expected, strict=True):
            assert [step.value for step in each.steps] == pytest.approx(scores, abs=1e-5)
            assert each.details == pytest.approx({"steps": len(scores), "lowest_step": min(scores)}, abs=1e-5)
    # without `steps` the model's class says what it is
    assert [each.value for each in results(make(model))] == pytest.approx([min(each) for each in expected], abs=1e-5)


def test_scale_and_shift_are_of_reward_and_steps(model: Path) -> None:
    plain = results(make(model, {"reduce": "mean"}))
    found = results(make(model, {"reduce": "mean"}, scale=2.0, shift=-1.0))
    assert [each.value for each in found] == pytest.approx([2 * each.value - 1 for each in plain])
    assert found[0].steps[0].value == pytest.approx(2 * plain[0].steps[0].value - 1)


def test_two_outputs_are_the_odds_of_a_right_step(tmp_path: Path) -> None:
    path = make_process_model(tmp_path, labels=2)  # as TRL trains them: no separator is stated
    found = results(make(path, {"separator": "\n", "split": "\n\n"}))
    expected = [[float(torch.tensor(both).softmax(0)[1]) for both in of_one] for of_one in by_hand(path, "\n")]
    assert [[step.value for step in each.steps] for each in found] == [
        pytest.approx(each, abs=1e-5) for each in expected
    ]
    with pytest.raises(RewardError, match="has no `step_separator`") as said:
        make(path).start()
    assert "a line break (the default of TRL)" in str(said.value.fix)


def test_what_is_read_behind_steps_need_not_stand_between_them(tmp_path: Path) -> None:
    path = make_process_model(tmp_path, step_separator="<extra_0>")
    found = results(make(path))  # split at blank lines
    assert [[step.end for step in each.steps] for each in found] == ENDS
    expected = [[sigmoid(score) for (score,) in of_one] for of_one in by_hand(path, "<extra_0>")]
    assert [[step.value for step in each.steps] for each in found] == [
        pytest.approx(each, abs=1e-5) for each in expected
    ]
    # an answer that writes it has not more steps for that
    (one,) = results(make(path), [completion("A<extra_0>B<extra_0>", prompt="Q")])
    assert [step.end for step in one.steps] == [20]


def test_values_of_a_regression_stay_as_they_are(tmp_path: Path) -> None:
    path = make_process_model(tmp_path, step_separator="\n\n", problem_type="regression")
    raw = [[score for (score,) in of_one] for of_one in by_hand(path)]
    assert [each.value for each in results(make(path))] == pytest.approx([min(each) for each in raw], abs=1e-5)
    squashed = results(make(path, squash="sigmoid"))
    assert [each.value for each in squashed] == pytest.approx([sigmoid(min(each)) for each in raw], abs=1e-5)


def test_reasoning_is_no_step_and_ends_count_all_that_was_sampled(model: Path) -> None:
    plain = completion("Rain falls.\n\nIt is wet.", prompt="Tell me about rain.")
    thought = given_completion(
        "<think>\n\nHm\n\n</think>\n\nRain falls.\n\nIt is wet.", messages=plain.messages, answer=None, metadata={}
    )
    one, other = results(make(model), [plain, thought])
    assert [step.value for step in one.steps] == [step.value for step in other.steps]
    assert [thought.full_text[: step.end].split()[-1] for step in other.steps] == ["falls.", "wet."]


def test_of_an_episode_the_last_turn_is_in_steps(model: Path) -> None:
    played = to_completion(episode(["left\n\nright", "up\n\ndown"]).trajectory)
    (found,) = results(make(model), [played])
    assert len(found.steps) == 2
    assert found.steps[-1].end == len(played.full_text)


def test_an_answer_that_is_too_long_is_lost_alone(model: Path) -> None:
    long = completion("rain " * 200, prompt="Tell me about rain.")
    first, second = outcomes(make(model, max_tokens=64), [GROUP[0], long])
    assert isinstance(first, RewardResult)
    assert isinstance(second, RewardError)
    assert "above max_tokens: 64" in str(second)


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (3, {}, "has 3 outputs, and label is None; one or two were expected"),
        (2, {"label": 1}, "has 2 outputs, and label is 1; one or two were expected"),
    ],
)
def test_outputs_that_say_nothing_of_steps_are_refused(
    tmp_path: Path, labels: int, settings: dict[str, Any], message: str
) -> None:
    path = make_process_model(tmp_path, labels=labels, step_separator="\n")
    with pytest.raises(RewardError, match=message):
        make(path, **settings).start()


def test_a_model_of_whole_conversations_has_no_steps(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"\(LlamaForSequenceClassification\) scores whole conversations") as said:
        make(make_classifier(tmp_path), {}).start()
    assert "remove `steps`" in str(said.value.fix)


OWN_CODE = """
import torch
from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput


class TinyForProcessRewardModel(LlamaPreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        width = config.hidden_size
        self.score = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, **options):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))
"""


def test_a_process_reward_model_of_its_own_code(tmp_path: Path) -> None:
    """As Qwen2.5-Math-PRM comes: `AutoModel`, two outputs behind a small network, no word of its separator."""
    path = make_process_model(tmp_path, labels=2)
    (path / "modeling_tiny.py").write_text(OWN_CODE)
    stated = json.loads((path / "config.json").read_text())
    stated |= {
        "architectures": ["TinyForProcessRewardModel"],
        "auto_map": {"AutoModel": "modeling_tiny.TinyForProcessRewardModel"},
    }
    (path / "config.json").write_text(json.dumps(stated))
    config = AutoConfig.from_pretrained(path)
    made = AutoModel.from_config(config, trust_remote_code=True)
    weights = made.state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    found = results(make(path, {"separator": "<extra_0>"}, trust_remote_code=True))
    assert [[step.end for step in each.steps] for each in found] == ENDS
    assert all(0 < step.value < 1 for each in found for step in each.steps)


class Returns:
    """A reward that gives what it was made with."""

    side_by_side = None
    hung = 0

    def __init__(self, result: Any) -> None:
        self._result = result

    async def score(self, completions: Any) -> Any:
        return [self._result for _ in completions]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([StepScore(1.0, 4), StepScore(1.0, 4)], r"go up, to at most 6 .* found \[4, 4\]"),
        ([StepScore(1.0, 7)], r"go up, to at most 6 .* found \[7\]"),
        ([StepScore(1.0, -1)], r"found \[-1\]"),
        ([StepScore(float("nan"), 4)], "the score of step 0 should be a finite number, found nan"),
        (None, r"steps should be a list of StepScore\(value, end\), found None"),
        ([(1.0, 4)], r"steps should be a list of StepScore\(value, end\), found \(1.0, 4\)"),
        ([StepScore(1.0, 4.5)], r"steps should be a list of StepScore"),  # type: ignore[arg-type]
    ],
)
async def test_steps_that_no_answer_has_lose_the_sample(steps: Any, message: str) -> None:
    caller: Any = RewardCaller(Returns(RewardResult(1.0, steps=steps)), 5.0)  # type: ignore[arg-type]
    ((outcome,), _) = await caller.call([completion("answer", prompt="Q")])
    assert isinstance(outcome, RewardError)
    assert re.search(message, str(outcome)), outcome


async def test_steps_come_back_as_plain_numbers() -> None:
    given = RewardResult(0.5, steps=[StepScore(np.float32(0.25), np.int64(3)), StepScore(True, 6)])  # type: ignore[arg-type]
    caller: Any = RewardCaller(Returns(given), 5.0)  # type: ignore[arg-type]
    ((outcome,), _) = await caller.call([completion("answer", prompt="Q")])
    assert outcome.steps == (StepScore(0.25, 3), StepScore(1.0, 6))
    assert [type(each) for step in outcome.steps for each in (step.value, step.end)] == [float, int, float, int]
