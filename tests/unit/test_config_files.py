from __future__ import annotations

from pathlib import Path

import pytest

from roll_like.config.load import dump_config, load_config

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path
    for folder in ("configs", "examples")
    for pattern in ("*.yaml", "*.yml")
    for path in (ROOT / folder).rglob(pattern)
    # of Kubernetes: test_launch.py; of Prometheus: test_metrics_prometheus.py; of evaluators:
    # test_data_benchmarks.py and test_other_evaluators.py
    if path.name not in {"rayjob.yaml", "prometheus.yml", "sums.yaml", "sums_benchmark.yaml"}
)

pytestmark = pytest.mark.usefixtures("recording_pipeline")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_file_is_valid_and_names_its_schema(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    mark = "# yaml-language-server: $schema="
    assert first.startswith(mark)
    assert (path.parent / first.removeprefix(mark)).resolve() == ROOT / "docs" / "schema" / f"{config.pipeline}.json"
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(again) == config


def test_the_gpu_examples_are_among_them() -> None:
    names = {path.name for path in FILES}
    assert {"rlvr_8gpu_colocated.yaml", "rlvr_2nodes_disaggregated.yaml"} <= names
