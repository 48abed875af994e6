"""Recorded rollouts as the source of a run's groups: a trainer without engines, rewards or environments.

runs/EARLIER/rollouts/step_000001.npz, step_000001.json, …    written with `rollout.save_tokens: true`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll_like.config.algorithm import ROUTER_REPLAY
from roll_like.config.demonstrations import ExperienceReplayConfig
from roll_like.config.rollout import ReplaySchedule
from roll_like.config.sampling import SamplingRunConfig
from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.rollout.collection import Collected
from roll_like.rollout.storage import has_groups, read_groups
from roll_like.types import Group, Origin, Scored


class ReplayedRollouts:
    """Reads the groups that an earlier run trained on in the same step.

    Args:
        config: The run's configuration; its schedule is `replay`.
        note: Told once if a recorded step has another number of groups than the configuration.

    Raises:
        ConfigError: There are no recorded rollouts for some step.
    """

    def __init__(
        self, config: SamplingRunConfig, schedule: ReplaySchedule, *, vocabulary: int, note: Callable[[str], None]
    ) -> None:
        require_recorded(schedule.path, config.steps)
        self._path = schedule.path
        self._rollout = config.rollout
        self._replays_routes = config.replays_routes
        self._truncation = config.rollout.truncation if config.replays_kept else ()
        self._joining = config.off_policy_origins
        algorithm = getattr(config, "algorithm", None)
        replayed = () if algorithm is None else ExperienceReplayConfig().violations(algorithm)
        self._unfit = next((violation.message for violation in replayed), None)
        self._vocabulary = vocabulary
        self._note = note
        self._noted = False

    def collect(self, step: int) -> Collected:
        """Return the groups of `step`, as they were recorded.

        Raises:
            CheckpointError: They cannot be read.
            ConfigError: They have a token that the model does not have, or lack the routes or the kept tokens that
                training needs.
        """
        groups = read_groups(tokens_stem(self._path, step + 1))
        for group in groups:
            self._refuse_off_policy(step, group)
            self._refuse_unknown_tokens(step, group)
            self._require_routes(step, group)
            self._require_kept(step, group)
        wanted = self._rollout.groups
        if len(groups) != wanted and not self._noted:
            self._noted = True
            self._note(
                f"step {step + 1} of {self._path} has {len(groups)} groups, and rollout.{self._rollout.groups_key} is "
                f"{wanted}; every step trains on the groups that were recorded"
            )
        samples = [sample for group in groups for sample in group.samples]
        return Collected(
            groups=tuple(groups),
            rejected=(),
            failures=tuple(failure for group in groups for failure in group.failures),
            started=len(groups),
            tokens=sum(sample.trajectory.response_length for sample in samples),
        )

    def state(self) -> dict[str, Any]:
        """Return nothing: the step says which groups are next."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; the step says where that is."""

    def save(self, directory: Path) -> None:
        """Write nothing into a checkpoint."""

    def load(self, directory: Path) -> None:
        """Read nothing back."""

    def _refuse_off_policy(self, step: int, group: Group[Scored]) -> None:
        origins = {one.trajectory.origin for one in group.off_policy}
        if Origin.DEMONSTRATION in origins - self._joining:
            raise ConfigError(
                f"step {step + 1} of {self._path} has demonstrations among the samples of its groups, and this run has "
                "no section demonstrations.off_policy",
                fix="add the section, as in the recorded run; or record rollouts without it",
            )
        if Origin.REPLAYED in origins and self._unfit is not None:
            raise ConfigError(
                f"step {step + 1} of {self._path} has answers of experience_replay in its groups: {self._unfit}",
                fix="change algorithm as it says, or record rollouts without experience_replay",
            )

    def _refuse_unknown_tokens(self, step: int, group: Group[Scored]) -> None:
        highest = max((int(sample.trajectory.token_ids.max(initial=0)) for sample in group.whole.samples), default=0)
        if highest >= self._vocabulary:
            raise ConfigError(
                f"step {step + 1} of {self._path} has the token {highest} in task {group.task.task_id!r}, and the "
                f"model's vocabulary ends at {self._vocabulary - 1}: another model sampled it",
                fix="set model.path to the model that made the recording, or record rollouts of this one",
            )

    def _require_routes(self, step: int, group: Group[Scored]) -> None:
        if self._replays_routes and any(sample.trajectory.routes is None for sample in group.whole.samples):
            raise ConfigError(
                f"step {step + 1} of {self._path} was recorded without the experts of its tokens, which "
                f"{ROUTER_REPLAY} replays",
                fix=f"record it with {ROUTER_REPLAY}: true, or set it to false",
            )

    def _require_kept(self, step: int, group: Group[Scored]) -> None:
        sampled = [one for one in group.whole.samples if one.trajectory.origin is not Origin.DEMONSTRATION]
        if self._truncation and any(sample.trajectory.kept is None for sample in sampled):
            keys = " and ".join(f"rollout.{key}" for key in self._truncation)
            raise ConfigError(
                f"step {step + 1} of {self._path} was recorded without the tokens that {keys} kept, over which the "
                "trainer would normalise",
                fix=f"remove {keys}, as in the recorded run; or record with it",
            )


def tokens_stem(run_dir: Path, step: int) -> Path:
    """Return where the groups of a step (1-based) lie in a run's folder, for `write_groups` and `read_groups`."""
    return files.rollouts_path(run_dir, step).with_suffix("")


def recorded_stems(run_dir: Path) -> list[Path]:
    """Return where the groups of all recorded steps lie in a run's folder, in the order of the steps."""
    folder = tokens_stem(run_dir, 1).parent
    stems = {file.with_suffix("") for file in folder.glob("step_*.npz")}
    return sorted(filter(has_groups, stems), key=lambda stem: (len(stem.name), stem.name))


def require_recorded(run_dir: Path, steps: int) -> None:
    """Check that a run's folder has the groups of the steps 1 to `steps`.

    Raises:
        ConfigError: It does not; says how many it has, and which key to change.
    """
    if not run_dir.is_dir():
        raise ConfigError(
            f"rollout.schedule.path: there is no folder {run_dir}", fix="name the folder of a run, such as runs/EARLIER"
        )
    recorded = next((step for step in range(steps) if not has_groups(tokens_stem(run_dir, step + 1))), steps)
    if recorded == 0:
        raise ConfigError(
            f"rollout.schedule.path: {run_dir} has no rollouts with tokens",
            fix="repeat that run with rollout.save_tokens: true",
        )
    if recorded < steps:
        raise ConfigError(
            f"rollout.schedule.path: {run_dir} has rollouts with tokens of {recorded} steps, and steps: {steps} asks "
            "for more",
            fix=f"set steps: {recorded}, or record more steps with rollout.save_tokens: true",
        )
