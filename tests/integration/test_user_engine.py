"""A run whose inference engine comes from a module of the user's: a subclass of the transformers engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hygiene import nothing_left
from run_config import read_lines, run_here, write_run

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("warm_ray")]

ENGINE = """
from pathlib import Path
from typing import Literal

from roll_like.inference.hf.config import HFConfig
from roll_like.inference.hf.plugin import HFPlugin
from roll_like.registry import INFERENCE_ENGINES


class CountingConfig(HFConfig):
    type: Literal["counting"] = "counting"
    file: Path


@INFERENCE_ENGINES.register("counting")
class Counting(HFPlugin):
    Config = CountingConfig

    @classmethod
    def engine(cls):
        from counting_engine import CountingEngine

        return CountingEngine

    @classmethod
    def environment(cls, config, spec):
        return {"COUNTING_ENGINE": f"{spec.threads} threads"}
"""

COUNTING = '''
import os

from roll_like.inference.hf.engine import HFEngine


class CountingEngine(HFEngine):
    """Writes down how many requests came between weight updates."""

    requests = 0

    async def submit(self, requests):
        self.requests += len(requests)
        await super().submit(requests)

    async def finish_weight_update(self, version):
        await super().finish_weight_update(version)
        with self._config.file.open("a") as file:
            print(f"{self.requests} requests before version {version}, {os.environ['COUNTING_ENGINE']}", file=file)
'''


@pytest.mark.slow
def test_a_users_engine_samples_and_takes_weights(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "users_engine.py").write_text(ENGINE)
    (tmp_path / "counting_engine.py").write_text(COUNTING)
    counts = tmp_path / "counts.txt"
    figures = []
    for name, inference in {"counting": {"type": "counting", "file": str(counts)}, "hf": {"type": "hf"}}.items():
        config = write_run(
            tmp_path,
            tiny_model,
            name=name,
            steps=2,
            inference=inference,
            checkpoint={"at_end": False, "export": False},
            **{"import": ["tiny_rewards", "users_engine"]},
        )
        with nothing_left():
            code, output = run_here(config)
        assert code == 0, output
        figures.append([step["rollout/reward/mean"] for step in read_lines(tmp_path / "runs" / name / "metrics.jsonl")])
    versions = [f"{16 * step} requests before version {step + 1}, 2 threads" for step in range(3)]
    assert counts.read_text().splitlines() == versions
    assert figures[0] == figures[1]
    assert len(figures[0]) == 2
