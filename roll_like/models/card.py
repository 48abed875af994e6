"""The card of a trained model: README.md, whose header the hub of Hugging Face reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from roll_like.config.model import ModelTask

#: The card's file in a model's directory.
CARD = "README.md"
#: The picture that the card shows, beside it.
CURVES = "curves.png"
#: What the hub calls metrics of an evaluation.
_METRIC_TYPES = {"eval/avg": "mean_reward", "eval/loss": "loss", "eval/accuracy": "accuracy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of the run that made a model.

    Attributes:
        name: Name of the run.
        base_model: What was trained, as the user spelt it.
        base_id: Its id on the hub, if it comes from there.
        pipeline: `rlvr`, `dpo`, …
        steps: Training steps done.
        evaluation: Metric name → (before, after); None where it was not measured.
        evaluated_on: Names of the datasets that were measured on.
        figures: Further numbers of the run, by metric name.
        settings: What decides how it was trained, by configuration key.
        datasets: Ids of the datasets from the hub that it was trained on.
        system_prompt: The system message before each prompt, if all training data had the same one.
        curves: A picture of the run's metrics, to be shown.
        config_yaml: The resolved configuration.
    """

    name: str
    base_model: str
    base_id: str | None = None
    pipeline: str
    steps: int
    evaluation: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    evaluated_on: Sequence[str] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    system_prompt: str | None = None
    curves: Path | None = None
    config_yaml: str = ""


def render_model_card(card: ModelCard, task: ModelTask = "text-generation") -> str:
    """Return the card as Markdown, with the metadata header that the hub reads.

    It names no licence: that follows from the base model's and the data's.
    """
    lines = ["---", _metadata(card, task).to_yaml(), "---", "", f"# {card.name}", ""]
    lines += [f"`{card.base_model}` after {card.steps} steps of the `{card.pipeline}` pipeline of roll_like.", ""]
    lines += ["## Use", "", "```python", *_usage(card, task), "```", ""]
    if card.evaluation:
        measured = f" on {', '.join(card.evaluated_on)}" if card.evaluated_on else ""
        lines += [f"## Evaluation{measured}", "", "| metric | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {_figure(old)} | {_figure(new)} |" for name, (old, new) in card.evaluation.items()]
        lines.append("")
    if card.settings or card.figures:
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| `{key}` | {value} |" for key, value in card.settings.items()]
        lines += [f"| {name} | {_figure(value)} |" for name, value in card.figures.items()]
        lines.append("")
    if card.curves is not None:
        lines += [f"![Metrics of the run]({CURVES})", ""]
    if card.config_yaml:
        lines += ["## Configuration", "", "```yaml", card.config_yaml.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def _metadata(card: ModelCard, task: ModelTask) -> ModelCardData:
    results = [
        EvalResult(
            task_type=task,
            dataset_type=" ".join(card.evaluated_on) or card.name,
            dataset_name=", ".join(card.evaluated_on) or card.name,
            metric_type=_METRIC_TYPES.get(name, name),
            metric_name=name,
            metric_value=after,
        )
        for name, (_, after) in card.evaluation.items()
        if after is not None and math.isfinite(after)
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=card.base_id,
        datasets=list(card.datasets) or None,
        tags=["roll_like", "reinforcement-learning", card.pipeline],
        model_name=card.name if results else None,
        eval_results=results or None,
    )


def _usage(card: ModelCard, task: ModelTask) -> list[str]:
    """Return Python that uses the model, as lines."""
    where = 'model = "."  # this folder, or the model\'s id on the hub'
    if task == "text-classification":
        return [
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            where,
            "tokenizer, scorer = AutoTokenizer.from_pretrained(model), "
            "AutoModelForSequenceClassification.from_pretrained(model)",
            'messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]',
            'inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)',
            "print(scorer(**inputs).logits.item())  # higher is better",
        ]
    if task == "token-classification":
        return [
            "import torch",
            "from transformers import AutoModelForTokenClassification, AutoTokenizer",
            "",
            where,
            "tokenizer, scorer = AutoTokenizer.from_pretrained(model), "
            "AutoModelForTokenClassification.from_pretrained(model)",
            'prompt, steps = [{"role": "user", "content": "What is 2 + 2 + 3?"}], ["2 + 2 is 4.", "4 + 3 is 8."]',
            'answer = [{"role": "assistant", "content": "MARK"}]  # as templates write answers: some begin otherwise',
            'begun = tokenizer.apply_chat_template(prompt + answer, tokenize=False).split("MARK")[0]',
            'ids, ends = tokenizer(begun, add_special_tokens=False)["input_ids"], []',
            "for step in steps:",
            "    for text in (step, scorer.config.step_separator):",
            '        ids += tokenizer(text, add_special_tokens=False)["input_ids"]',
            "    ends.append(len(ids) - 1)  # a step is scored at the last token of its separator",
            "print(scorer(torch.tensor([ids])).logits[0, ends, 0].tolist())  # higher is better",
        ]
    system = [] if card.system_prompt is None else [f'    {{"role": "system", "content": {card.system_prompt!r}}},']
    return [
        "from transformers import pipeline",
        "",
        where,
        'chat = pipeline("text-generation", model=model)',
        "messages = [",
        *system,
        '    {"role": "user", "content": "What is 2 + 2?"},',
        "]",
        'print(chat(messages, max_new_tokens=256)[0]["generated_text"][-1]["content"])',
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
