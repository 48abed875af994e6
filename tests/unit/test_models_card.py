"""Cards of models: what the hub's own library reads in them, and the code that they show."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from config_files import MINIMAL, MINIMAL_AGENTIC, changed
from run_folders import make_run

from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.model import ModelConfig
from roll_like.data.steps import step_pieces
from roll_like.metrics.summary import write_summary
from roll_like.models.card import ModelCard, render_model_card
from roll_like.models.classifier import load_classifier
from roll_like.models.export import save_hf_directory
from roll_like.models.load import QUICKSTART_MODEL, load_renderer, load_tokenizer
from roll_like.run.card import model_card

CARD = ModelCard(
    name="quickstart",
    base_model="org/base",
    base_id="org/base",
    pipeline="rlvr",
    steps=40,
    evaluation={"eval/avg": (0.25, 0.5), "eval/pass@4": (None, 0.75), "eval/kl": (0.1, float("nan"))},
    evaluated_on=["sums", "org/questions"],
    figures={"reward_last": 0.625},
    settings={"training.optimizer.lr": "1e-05"},
    datasets=["org/rows"],
    curves=Path("somewhere/curves.png"),
    config_yaml="steps: 40\n",
)


def test_the_hubs_library_reads_the_header() -> None:
    read = huggingface_hub.ModelCard(render_model_card(CARD))
    assert read.data.library_name == "transformers"
    assert read.data.pipeline_tag == "text-generation"
    assert read.data.base_model == "org/base"
    assert read.data.datasets == ["org/rows"]
    assert read.data.tags == ["roll_like", "reinforcement-learning", "rlvr"]
    assert read.data.license is None
    assert read.data.model_name == "quickstart"
    results = [(one.metric_type, one.metric_name, one.metric_value) for one in read.data.eval_results or []]
    assert results == [("mean_reward", "eval/avg", 0.5), ("eval/pass@4", "eval/pass@4", 0.75)]  # no NaN
    assert {one.dataset_name for one in read.data.eval_results or []} == {"sums, org/questions"}
    assert {one.task_type for one in read.data.eval_results or []} == {"text-generation"}


def test_the_text_tells_the_run() -> None:
    text = huggingface_hub.ModelCard(render_model_card(CARD)).text
    assert "# quickstart\n\n`org/base` after 40 steps of the `rlvr` pipeline" in text
    assert "## Evaluation on sums, org/questions" in text
    assert "| eval/avg | 0.25 | 0.5 |" in text
    assert "| eval/pass@4 | – | 0.75 |" in text
    assert "| `training.optimizer.lr` | 1e-05 |" in text
    assert "| reward_last | 0.625 |" in text
    assert "![Metrics of the run](curves.png)" in text
    assert "```yaml\nsteps: 40\n```" in text


def test_a_card_with_nothing_measured_and_a_local_model() -> None:
    card = ModelCard(name="x", base_model=QUICKSTART_MODEL, pipeline="sft", steps=1)
    read = huggingface_hub.ModelCard(render_model_card(card))
    assert read.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    assert "Evaluation" not in read.text
    assert "curves" not in read.text


@pytest.mark.parametrize("system", [None, 'Say "one"\nword.'])
def test_the_code_of_the_card_works(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str | None
) -> None:
    card = ModelCard(name="x", base_model="b", pipeline="sft", steps=1, system_prompt=system)
    found = re.search(r"```python\n(.*?)```", render_model_card(card), flags=re.S)
    assert found is not None
    monkeypatch.chdir(tiny_model)
    names: dict[str, object] = {}
    exec(found[1].replace("max_new_tokens=256", "max_new_tokens=4"), names)
    messages = names["messages"]
    assert isinstance(messages, list)
    assert messages[:-1] == ([] if system is None else [{"role": "system", "content": system}])
    assert capsys.readouterr().out.strip()


def test_what_a_run_and_its_configuration_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "local").mkdir()  # has the form of an id, and is none
    sources = [{"path": "org/rows", "system_prompt": "Be short."}, {"path": "a.jsonl", "system_prompt": "Be short."}]
    config = RLVRConfig.model_validate(
        changed(data__sources=sources, evaluation__sources=[{"path": "evals/b.jsonl"}], evaluation__every=5)
    )
    folder = make_run(tmp_path / "runs" / "sums")
    card = model_card(config, 4, write_summary(folder))
    assert (card.name, card.steps, card.base_id) == ("sums", 4, "org/model")
    assert card.datasets == ["org/rows"]
    assert card.system_prompt == "Be short."
    assert card.evaluated_on == ["b"]
    assert card.evaluation == {"eval/avg": (0.25, 0.5)}
    assert card.settings["data.sources"] == "org/rows, a"
    assert card.settings["rewards.use"] == "ifeval"
    assert card.settings["algorithm.advantage.type"] == "grpo"
    assert "algorithm.kl.use" not in card.settings  # there is no KL penalty
    assert card.curves == folder / "curves.png"
    local = RLVRConfig.model_validate(changed(MINIMAL, model__path="org/local"))
    assert model_card(local, 4).base_id is None
    assert model_card(local, 4).evaluation == {}
    assert model_card(AgenticConfig.model_validate(MINIMAL_AGENTIC), 4).datasets == []


def test_a_run_without_an_evaluation_has_no_table_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "sums")
    (folder / "evaluations.jsonl").write_text("")
    card = model_card(RLVRConfig.model_validate(MINIMAL), 4, write_summary(folder))
    assert card.evaluation == {}
    assert card.figures.keys() == {"reward_first", "reward_last"}


@pytest.mark.parametrize(("task", "scores"), [("text-classification", 1), ("token-classification", 2)])
def test_the_code_of_a_classifiers_card_works(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    task: Any,
    scores: int,
) -> None:
    card = ModelCard(name="x", base_model="b", pipeline="reward_model", steps=1)
    model = load_classifier(tiny_model, "float32", seed=0, task=task)
    model.config.step_separator = "\n"
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_model)))
    # as Qwen3's, which writes an empty block before an answer, and not in the prompt
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ message.content }}", "{% if message.role == 'assistant' %}<t></t>{% endif %}{{ message.content }}"
    )
    assert "<t>" in tokenizer.chat_template
    save_hf_directory(model.state_dict(), model.config, tokenizer, tmp_path / "m", card, task=task)
    text = (tmp_path / "m" / "README.md").read_text()
    assert huggingface_hub.ModelCard(text).data.pipeline_tag == task
    found = re.search(r"```python\n(.*?)```", text, flags=re.S)
    assert found is not None
    monkeypatch.chdir(tmp_path / "m")
    names: dict[str, Any] = {}
    exec(found[1], names)
    printed = [float(number) for number in capsys.readouterr().out.strip().strip("[]").split(",")]
    assert len(printed) == scores
    assert all(map(math.isfinite, printed))
    if task == "token-classification":
        renderer = load_renderer(ModelConfig(path=str(tmp_path / "m")))
        pieces = step_pieces(renderer, names["prompt"], (), names["steps"], "\n")
        assert names["ids"] == [int(token) for piece in pieces for token in renderer.encode(piece.text)]
