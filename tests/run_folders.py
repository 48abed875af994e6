"""Folders of runs, as `MetricsManager` writes them, with figures that are easy to compute by hand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from roll_like.config.run import MetricsConfig
from roll_like.metrics.manager import MetricsManager
from roll_like.values import Mean, Sum

PROMPT = "Which is more: 2 or 3?"


def answer(text: str, reward: float, *, task: str = "sums:0", prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """A row of rollouts."""
    return {
        "task_id": task,
        "source": "sums",
        "domain": "sums",
        "sample_index": 0,
        "prompt": prompt,
        "text": text,
        "reward": reward,
        "tokens": len(text.split()),
        "stop_reason": "stop",
        **more,
    }


def make_run(
    folder: Path,
    *,
    steps: int = 4,
    seed: int = 0,
    pipeline: str = "rlvr",
    lift: float = 0.0,
    rows: tuple[dict[str, Any], dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    end: str | None = "finished",
) -> Path:
    """Write a run: rewards of step/10 + lift, an evaluation of 0.25 + lift before and of 0.5 + lift after.

    Args:
        folder: Its folder; the name is the run's.
        steps: Training steps; 0 writes neither steps nor evaluations.
        seed: In its configuration.
        pipeline: Its pipeline; `sft` logs losses instead of rewards.
        lift: Added to every reward.
        rows: A rollout of the evaluation before training and one of that after it.
        config: Further keys of its configuration.
        end: How it ended; None leaves it open.
    """
    folder.mkdir(parents=True)
    params = {
        "pipeline": pipeline,
        "name": folder.name,
        "seed": seed,
        "output_dir": str(folder.parent),
        **(config or {}),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    settings = MetricsConfig(trackers=(), console="quiet")
    manager = MetricsManager(settings, folder, folder.name, steps or 4, params, evaluations=(0, steps))
    manager.__enter__()
    if steps:
        _evaluate(manager, 0, 0.25 + lift, pipeline, rows[0] if rows else answer("two", 0.0))
    for step in range(1, steps + 1):
        timed = {"time/step": Sum(10.0), "time/generate": Sum(6.0), "time/train": Sum(3.0)}
        length = {
            "rollout/response_length/mean": Mean(20.0 - step),
            "rollout/samples": Sum(8),
            "rollout/tokens": Sum(80),
        }
        if pipeline == "sft":
            learned = {"train/perplexity": Mean(9.0 - step), "train/loss": Mean(3.0 / step), "train/lr": Mean(1e-5)}
        else:
            learned = {"rollout/reward/mean": Mean(step / 10 + lift), "mismatch/kl": Mean(0.001), **length}
        manager.log(step, {**learned, **timed})
        if pipeline != "sft":
            manager.log_rollouts(step, [answer(f"answer of step {step}", step / 10, reference="3")])
    if steps:
        _evaluate(manager, steps, 0.5 + lift, pipeline, rows[1] if rows else answer("three", 1.0, reference="3"))
    if end is not None:
        manager.close(end)  # type: ignore[arg-type]
    return folder


def _evaluate(manager: MetricsManager, step: int, score: float, pipeline: str, row: dict[str, Any]) -> None:
    if pipeline == "sft":
        manager.log_evaluation(step, {"eval/loss": Mean(2.0 - score)})
        return
    manager.log_evaluation(step, {"eval/avg": Mean(score), "eval/pass@4": Mean(min(1.0, 2 * score))})
    manager.log_rollouts(step, [row], kind="eval")


class Page(HTMLParser):
    """What a page has in it as it is written, before its script runs.

    Attributes:
        tags: Name and attributes of every element.
        text: All text but that of style sheets.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data


def data_of(source: str) -> dict[str, Any]:
    """What a page gives its script; fails if the page loads anything, or lets another script run."""
    page = Page(source)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed", "img", "base", "image"})
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in {"src", "href"}], tag
    scripts = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    assert scripts == ["application/json", None]
    (policy,) = [one["content"] for tag, one in page.tags if tag == "meta" and one.get("http-equiv")]
    script = source.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert "@import" not in source
    assert "url(" not in source.partition("</style>")[0]
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    return dict(json.loads(text))
