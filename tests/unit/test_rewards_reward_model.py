"""The reward-model reward with a classifier of a few hundred kilobytes, made on the fly."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes import episode
from reward_support import completion, outcomes
from tiny_model import VOCABULARY, make_tiny_tokenizer
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from roll_like import Completion, RewardResult, check_reward
from roll_like.builtin.rewards.reward_model import RewardModel, RewardModelConfig
from roll_like.errors import RewardError
from roll_like.registry import REWARDS
from roll_like.rewards.scorer import to_completion

GROUP = [
    completion("Rain falls.", prompt="Tell me about rain."),
    completion("The student describes numbers from one to twelve for breakfast.", prompt="Tell me about rain."),
    completion("", prompt="Tell me about rain."),
    completion("A", prompt="Tell me about rain."),
    completion("Bees and bees and bees.", prompt="Tell me about rain."),
]


def make_classifier(directory: Path, *, labels: int = 1, pad: bool = True) -> Path:
    tokenizer = make_tiny_tokenizer()
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
        pad_token_id=tokenizer.pad_token_id if pad else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def make(path: Path, **settings: Any) -> RewardModel:
    return RewardModel(RewardModelConfig(path=str(path), **settings))


def results(reward: RewardModel, group: list[Completion] = GROUP) -> list[RewardResult]:
    found = outcomes(reward, group)
    assert all(isinstance(outcome, RewardResult) for outcome in found), found
    return [outcome for outcome in found if isinstance(outcome, RewardResult)]


def one_by_one(path: Path, label: int = 0) -> list[float]:
    """The scores that transformers gives, one conversation at a time, without padding."""
    tokenizer = make_tiny_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    scores = []
    for item in GROUP:
        messages = [*item.messages, {"role": "assistant", "content": item.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text.endswith(f"assistant\n{item.text}<|im_end|>\n")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            scores.append(float(model(input_ids=ids).logits[0, label]))
    return scores


def test_is_registered_by_its_entry_point() -> None:
    assert REWARDS.get("reward_model") is RewardModel


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_batches_give_what_single_conversations_give(classifier: Path, batch_size: int) -> None:
    expected = one_by_one(classifier)
    assert max(expected) - min(expected) > 0.1  # a model that sees no difference would prove nothing
    found = results(make(classifier, batch_size=batch_size))
    assert [result.value for result in found] == pytest.approx(expected, abs=1e-4)


def test_without_a_padding_token_too(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, pad=False)
    assert [result.value for result in results(make(path))] == pytest.approx(one_by_one(path), abs=1e-4)


def test_sigmoid_scale_and_shift(classifier: Path) -> None:
    raw = [result.value for result in results(make(classifier))]
    found = results(make(classifier, squash="sigmoid", scale=2.0, shift=-1.0))
    assert [result.value for result in found] == pytest.approx([2 / (1 + math.exp(-score)) - 1 for score in raw])
    assert [result.details["raw"] for result in found] == pytest.approx(raw)


def test_it_is_loaded_once_and_let_go(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Any] = []
    load = AutoModelForSequenceClassification.from_pretrained

    def counted(*args: Any, **kwargs: Any) -> Any:
        loads.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", counted)
    reward = make(classifier)
    assert loads == []  # checking a configuration loads nothing
    reward.start()
    results(reward)
    results(reward)
    assert len(loads) == 1
    reward.close()
    results(reward)
    assert len(loads) == 2


def test_a_conversation_that_is_too_long_is_lost_alone(classifier: Path) -> None:
    long = completion("rain " * 200, prompt="Tell me about rain.")
    short, lost = outcomes(make(classifier, max_tokens=64), [GROUP[0], long])
    assert isinstance(short, RewardResult)
    assert isinstance(lost, RewardError)
    assert "above max_tokens: 64" in str(lost)


def test_one_output_of_several(tmp_path: Path) -> None:
    path = make_classifier(tmp_path, labels=3)
    found = results(make(path, label=2))
    assert [result.value for result in found] == pytest.approx(one_by_one(path, label=2), abs=1e-4)
    for label in (None, 3):
        with pytest.raises(RewardError, match="has 3 outputs"):
            make(path, label=label).start()


def test_a_model_of_its_own_template_and_one_without(classifier: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    own = [result.value for result in results(make(classifier, chat_template=template))]
    assert own != pytest.approx([result.value for result in results(make(classifier))])
    path = make_classifier(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(RewardError, match="no chat template"):
        make(path).start()


def test_variables_of_the_template(classifier: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}{{ mood }}")
    plain = [result.value for result in results(make(classifier, chat_template=template))]
    options = {"mood": "Rain falls."}
    told = [result.value for result in results(make(classifier, chat_template=template, template_options=options))]
    assert told != pytest.approx(plain)


def test_a_conversation_that_the_template_refuses_is_lost_alone(classifier: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for message in messages %}{% if 'Bees' in message.content %}{{ raise_exception('no bees') }}{% endif %}"
        "{{ message.content }}{% endfor %}"
    )
    *fine, lost = outcomes(make(classifier, chat_template=template), GROUP)
    assert all(isinstance(outcome, RewardResult) for outcome in fine)
    assert isinstance(lost, RewardError)
    assert "the chat template refuses messages with the roles user, assistant: no bees" in str(lost)
    assert "`chat_template` (or `template_options`) of the reward_model reward" in str(lost)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="cannot be loaded"):
        make(tmp_path / "nowhere").start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(classifier: Path) -> None:
    with pytest.raises(RewardError, match="sees no GPU"):
        make(classifier, device="cuda").start()


def test_a_score_that_is_no_number_is_a_failure(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = make(classifier)
    monkeypatch.setattr(reward, "_forward", lambda rows: [[math.nan]] * len(rows))
    assert all(isinstance(outcome, RewardError) for outcome in outcomes(reward, GROUP))


def test_its_own_cases_ask_for_an_order_and_not_for_a_scale(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = make(classifier)
    lengths: list[int] = []

    def shorter_is_better(rows: Any) -> list[list[float]]:
        lengths.extend(len(row.token_ids) for row in rows)
        return [[-float(len(row.token_ids))] for row in rows]

    reward.start()
    monkeypatch.setattr(reward, "_forward", shorter_is_better)
    report = check_reward(reward)
    assert lengths
    found = {answer.text: answer.problems for answer in report.answers}
    assert found["The capital of France is Paris."] == found[""] == ()
    assert "as much as a right one" in found["I do not want to answer that."][0]


def test_importing_the_plugin_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, rewards.reward_model; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_of_an_episode_the_conversation_up_to_its_last_turn_is_scored(classifier: Path) -> None:
    played = to_completion(episode(["left", "right"]).trajectory)
    assert played.conversation[-1] == {"role": "user", "content": "It is over."}
    asked = replace(played, turns=(), messages=played.conversation[:-2])  # the same as a prompt with its response
    reward = make(classifier)
    assert results(reward, [played]) == results(reward, [asked])
    reward.close()
