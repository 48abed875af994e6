"""Trackio and SwanLab: figures in their own dashboards, through their libraries."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from roll_like.config.base import PluginConfig
from roll_like.metrics.trackers import LibraryRunTracker, Status, flatten_params, optional_module
from roll_like.registry import TRACKERS


class TrackioConfig(PluginConfig):
    """Trackio: a dashboard on this machine, or in a Hugging Face Space."""

    type: Literal["trackio"] = "trackio"
    project: str | None = Field(default=None, description="Project of the run; default: the pipeline's name.")
    space: str | None = Field(default=None, description="Space that shows it, `owner/name`; default: this machine.")


@TRACKERS.register("trackio")
class TrackioTracker(LibraryRunTracker):
    """Logs to Trackio, whose steps are the training steps."""

    Config = TrackioConfig

    def start(
        self,
        *,
        run_dir: Path,  # noqa: ARG002 - Trackio has a folder of its own (`TRACKIO_DIR`)
        run_name: str,
        params: Mapping[str, Any],
        resume_id: str | None,
        resume_step: int | None,  # noqa: ARG002 - Trackio keeps the points of steps that come again
    ) -> str:
        """Begin or continue a run."""
        trackio = optional_module("trackio", "trackio")
        self._run = trackio.init(
            project=self.project(params),
            name=run_name,
            space_id=self._config.space,
            config=flatten_params(params),
            resume="must" if resume_id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return run_name

    def close(self, status: Status) -> None:  # noqa: ARG002 - runs of Trackio have no status
        """Write what is buffered."""
        self._run.finish()


class SwanLabConfig(PluginConfig):
    """SwanLab: its cloud, or files that its own dashboard shows."""

    type: Literal["swanlab"] = "swanlab"
    project: str | None = Field(default=None, description="Project of the run; default: the pipeline's name.")
    workspace: str | None = Field(default=None, description="User or organisation; default: your own.")
    mode: Literal["online", "local", "offline"] = Field(
        default="online",
        description="online: sends them. local: for `swanlab watch`. offline: files that `swanlab sync` sends later.",
    )


@TRACKERS.register("swanlab")
class SwanLabTracker(LibraryRunTracker):
    """Logs to SwanLab, whose steps are the training steps."""

    Config = SwanLabConfig

    def start(
        self,
        *,
        run_dir: Path,
        run_name: str,
        params: Mapping[str, Any],
        resume_id: str | None,
        resume_step: int | None,  # noqa: ARG002 - SwanLab keeps the first point of a step
    ) -> str:
        """Begin or continue a run; its files go to `swanlab/` in the run's folder."""
        swanlab = optional_module("swanlab", "swanlab")
        run_id = resume_id or uuid.uuid4().hex[:21]
        self._run = swanlab.init(
            project=self.project(params),
            workspace=self._config.workspace,
            name=run_name,
            config=dict(params),
            log_dir=str(run_dir / "swanlab"),
            mode=self._config.mode,
            id=run_id,
            resume="allow" if resume_id else None,
        )
        return run_id

    def close(self, status: Status) -> None:
        """End the run; one that was stopped is aborted, one that failed crashed."""
        states = {"finished": "success", "stopped": "aborted", "failed": "crashed"}
        self._run.finish(state=states[status], error=None if status == "finished" else f"the run {status}")
