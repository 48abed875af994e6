"""Folders of runs, as `MetricsManager` writes them, with figures that are easy to compute by hand."""

from __future__ import annotations

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
    """What a page has in it: its elements, and its text.

    Attributes:
        tags: Name and attributes of every element.
        text: All text but that of style sheets.
        cells: The cells of every row of every table.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.cells: list[list[str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "img", "input"}:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in {"td", "th"}:
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
        if self._open and {"td", "th"} & set(self._open):
            self.cells[-1][-1] += data.strip()

    @property
    def names(self) -> set[str]:
        """Names of all elements."""
        return {tag for tag, _ in self.tags}

    def row(self, first: str) -> list[str]:
        """The row of a table whose first cell is this."""
        (found,) = [cells for cells in self.cells if cells and cells[0] == first]
        return found


def stands_alone(page: Page, source: str) -> None:
    """Fail if a page runs a script or loads anything."""
    assert page.names.isdisjoint({"script", "link", "iframe", "object", "embed", "img", "base", "form", "image"})
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "formaction"}:
                assert (value or "").startswith("#"), f"<{tag} {name}={value!r}>"
            if name == "style":
                assert "url(" not in (value or "").replace("url(#", "")
    assert "@import" not in source
    (policy,) = [one["content"] for tag, one in page.tags if tag == "meta" and one.get("http-equiv")]
    assert (policy or "").startswith("default-src 'none'")
