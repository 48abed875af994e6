"""The figures of benchmarks: intervals, pass@k, differences of models, and how they are joined with a run's own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from tests_support import group, task

from roll_like import RLVRConfig, cli
from roll_like.config.benchmarks import BenchmarkUse
from roll_like.config.evaluation import EvaluationConfig
from roll_like.errors import ConfigError, DataError
from roll_like.rollout.benchmarks import (
    BenchmarkEvaluator,
    BenchmarkResult,
    benchmark_results,
    benchmark_sampling,
    interval,
    paired_difference,
)
from roll_like.rollout.collection import Collected
from roll_like.rollout.metrics import evaluation_metrics
from roll_like.run import measure
from roll_like.run.measure import MeasuredModel, result_tables, results_json, score_differences
from roll_like.types import Failure, Group, Scored
from roll_like.values import Mean, Metric, reduce

USE = BenchmarkUse.model_validate({"name": "gsm8k", "temperature": 1.0, "samples_per_prompt": 2})


def collected(groups: Sequence[Group[Scored]], rejected: Sequence[Group[Scored]] = ()) -> Collected:
    return Collected(groups=tuple(groups), rejected=tuple(rejected), failures=(), started=len(groups), tokens=1)


def measured(rewards: Sequence[Sequence[float]], use: BenchmarkUse = USE) -> BenchmarkResult:
    groups = [group(task(index, source=use.domain), list(values)) for index, values in enumerate(rewards)]
    [result] = benchmark_results(collected(groups), [use])
    return result


def test_the_interval_is_wilson_s_where_values_are_0_and_1() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857), table I: 81 of 263 and 0 of 20, method 3
    found = interval([1.0] * 81 + [0.0] * 182)
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)
    assert (interval([0.0] * 20).low, round(interval([0.0] * 20).high, 4)) == (0.0, 0.1611)
    assert math.isnan(interval([]).value)


def test_the_interval_covers_the_mean_of_few_tasks_with_several_answers() -> None:
    draws = np.random.default_rng(0)
    inside, widths, trials, truth = 0, [], 2000, 0.5
    for _ in range(trials):
        chances = draws.beta(2, 2, 30)
        found = interval(list(draws.binomial(8, chances) / 8))
        inside += found.low <= truth <= found.high
        widths.append(found.high - found.low)
    assert 0.93 <= inside / trials <= 0.97
    assert float(np.mean(widths)) < interval([0.0, 1.0] * 15).high - interval([0.0, 1.0] * 15).low


def test_the_difference_of_two_models_is_over_the_tasks_that_both_have() -> None:
    first = {str(index): float(index % 2) for index in range(100)}
    second = {**{str(index): 1.0 for index in range(50)}, **{str(index): first[str(index)] for index in range(50, 90)}}
    found = paired_difference(first, second)
    assert (found.tasks, round(found.value, 4)) == (90, round(25 / 90, 4))
    # 25 pairs +1, 65 pairs 0 and Agresti and Min's two: (25 + ½ - ½)/92 ± 1.96 √(((25 + 1) - 25²/92)/92)/√92
    centre, error = 25 / 92, 1.959964 * math.sqrt((26 - 25**2 / 92) / 92 / 92)
    assert (found.low, found.high) == (pytest.approx(centre - error), pytest.approx(centre + error))
    assert paired_difference(first, first).low < 0 < paired_difference(first, first).high


def test_the_difference_covers_the_truth_for_few_tasks() -> None:
    draws, inside, trials = np.random.default_rng(1), 0, 2000
    for _ in range(trials):
        easy = draws.random(30)
        first = {str(index): float(draws.random() < 0.5 * chance) for index, chance in enumerate(easy)}
        second = {str(index): float(draws.random() < 0.5 * chance + 0.3) for index, chance in enumerate(easy)}
        found = paired_difference(first, second)
        inside += found.low <= 0.3 <= found.high
    assert 0.93 <= inside / trials <= 0.98


def test_scores_outside_0_and_1_have_a_normal_interval() -> None:
    for values in ([3.0, 1.0, 2.0, 2.0], [-3.0, -1.0, -2.0, -2.0], [1.5, -0.5, 0.5, 0.5]):  # the last one's mean is 0.5
        found, half = interval(values), 1.959964 * math.sqrt(2 / 3) / 2  # variance 2/(4 - 1), 4 tasks
        mean = sum(values) / 4
        assert (found.low, found.value, found.high) == pytest.approx((mean - half, mean, mean + half))
    first, second = {"a": 0.0, "b": -1.0, "c": 0.5}, {"a": 5.0, "b": 3.0, "c": 2.5}
    found, half = paired_difference(first, second), 1.959964 * math.sqrt(7 / 3 / 3)  # 5, 4 and 2: variance 7/3
    assert (found.low, found.value, found.high) == pytest.approx((11 / 3 - half, 11 / 3, 11 / 3 + half))
    assert interval([2.0]).as_json() == {"value": 2.0, "low": None, "high": None, "tasks": 1}
    one = measured([[2.0, 2.0]])
    assert json.loads(json.dumps(one.as_json(), allow_nan=False))["figures"]["avg@2"]["low"] is None


def test_figures_are_over_tasks() -> None:
    result = measured([[1, 1], [1, 0], [0, 0]])
    assert {name: one.value for name, one in result.figures.items()} == {
        "avg@2": 0.5,
        "pass@1": 0.5,
        "pass@2": pytest.approx(2 / 3),
        "r": 0.5,
    }
    assert list(result.tasks.values()) == [1.0, 0.5, 0.0]


def test_a_task_that_lost_an_answer_counts_in_the_mean_alone() -> None:
    lost = Failure(stage="generate", name="0", error="gone", origin="x:1")
    groups = [group(task(0, source=USE.domain), [1.0, 1.0]), group(task(1, source=USE.domain), [0.0])]
    rejected: list[Group[Scored]] = [Group(task=task(2, source=USE.domain), samples=(), failures=(lost, lost))]
    groups[1] = replace(groups[1], failures=(lost,))
    [result] = benchmark_results(collected(groups, rejected), [USE])
    assert (result.figures["avg@2"].value, result.figures["avg@2"].tasks) == (0.5, 2)
    assert (result.figures["pass@2"].value, result.figures["pass@2"].tasks) == (1.0, 1)
    assert result.failures == 3


def test_a_benchmark_without_a_scored_answer_has_no_figure() -> None:
    [result] = benchmark_results(collected([]), [USE])
    text = json.dumps(result.as_json(), allow_nan=False)
    assert math.isnan(BenchmarkResult.from_json(json.loads(text)).figures["avg@2"].value)


class FakeEvaluator:
    """Brings given groups."""

    def __init__(self, groups: Sequence[Group[Scored]], k: int) -> None:
        self._groups, self._k = groups, k

    def evaluate(self):  # type: ignore[no-untyped-def]
        found = collected(self._groups)
        return evaluation_metrics(found, self._k), found


def benchmark_evaluator(
    evaluators: Mapping[str, FakeEvaluator], warn: Callable[[str], None] = print
) -> BenchmarkEvaluator:
    names = [name for name in evaluators if name]
    schedule = EvaluationConfig.model_validate({"benchmarks": names})
    return BenchmarkEvaluator(evaluators, schedule, warn)  # type: ignore[arg-type]


def test_a_run_measures_its_own_tasks_and_benchmarks() -> None:
    own = FakeEvaluator([group(task(0), [0.25, 0.25])], 2)
    gsm8k = FakeEvaluator([group(task(0, source="benchmark/gsm8k"), [1.0])], 1)
    ifeval = FakeEvaluator([group(task(0, source="benchmark/ifeval"), [0.5])], 1)
    evaluator = benchmark_evaluator({"": own, "gsm8k": gsm8k, "ifeval": ifeval})
    metrics, answers = evaluator.evaluate()
    values = reduce(metrics)
    assert (values["eval/avg"], values["eval/benchmark/gsm8k/avg"], values["eval/benchmark/ifeval/avg"]) == (
        0.25,
        1,
        0.5,
    )
    assert values["eval/benchmarks"] == 0.75
    assert len(answers.groups) == 3
    assert evaluator.score(values) == 0.25
    lost = benchmark_evaluator({"": FakeEvaluator([], 2), "gsm8k": gsm8k})
    values = reduce(lost.evaluate()[0])
    assert (values["eval/benchmarks"], lost.score(values)) == (1, None)
    alone = reduce(benchmark_evaluator({"": own}).evaluate()[0])
    assert (alone["eval/avg"], "eval/benchmarks" in alone) == (0.25, False)
    assert (evaluator.due(0, 5), evaluator.due(3, 5), evaluator.due(5, 5)) == (True, False, True)


def test_without_tasks_of_its_own_a_run_has_the_benchmarks_mean() -> None:
    gsm8k = FakeEvaluator([group(task(0, source="benchmark/gsm8k"), [1.0])], 1)
    ifeval = FakeEvaluator([group(task(0, source="benchmark/ifeval"), [0.5])], 1)
    evaluator = benchmark_evaluator({"gsm8k": gsm8k, "ifeval": ifeval})
    values = reduce(evaluator.evaluate()[0])
    assert values["eval/avg"] == values["eval/benchmarks"] == evaluator.score(values) == 0.75


@pytest.mark.parametrize("of_its_own", [True, False])
def test_a_benchmark_without_a_figure_leaves_the_mean_out(of_its_own: bool) -> None:
    own = {"": FakeEvaluator([group(task(0), [0.25])], 1)} if of_its_own else {}
    gsm8k = FakeEvaluator([group(task(0, source="benchmark/gsm8k"), [1.0])], 1)
    said: list[str] = []
    evaluator = benchmark_evaluator(
        {**own, "gsm8k": gsm8k, "ifeval": FakeEvaluator([], 1), "mbpp": FakeEvaluator([], 1)}, said.append
    )
    values = reduce(evaluator.evaluate()[0])
    assert "eval/benchmarks" not in values
    assert (values["eval/benchmark/gsm8k/avg"], evaluator.score(values)) == (1, 0.25 if of_its_own else None)
    assert said == ["no mean of the benchmarks: all answers to ifeval, mbpp were lost to failures"]


def test_graders_have_their_own_names_in_metrics() -> None:
    use = BenchmarkUse(name="gsm8k")
    named = [str(grader.name) for grader in use.rewards()]  # type: ignore[attr-defined]
    assert named == ["benchmark/gsm8k/strict_match", "benchmark/gsm8k/flexible_extract"]
    sample = group(task(0, source=use.domain), [1.0])
    rewards = dict.fromkeys(named, 1.0)
    scored = replace(sample, samples=tuple(replace(one, rewards=rewards) for one in sample.samples))
    evaluator = benchmark_evaluator({"gsm8k": FakeEvaluator([scored], 1)})
    assert evaluator.evaluate()[0]["eval/benchmark/gsm8k/reward/strict_match"] == Mean(1.0)
    [result] = benchmark_results(collected([scored]), [use])
    assert list(result.figures) == ["avg@1", "strict_match", "flexible_extract"]


def test_a_benchmark_s_sampling_may_be_changed() -> None:
    use = BenchmarkUse(name="aime24", samples_per_prompt=8, max_response_tokens=100)
    sampling = benchmark_sampling(use)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.6, 0.95, 100, ())
    assert use.changed_keys == {"samples_per_prompt": 8, "max_response_tokens": 100}
    assert BenchmarkUse(name="aime24").changed_keys == {}
    assert benchmark_sampling(BenchmarkUse(name="aime24", top_k=20)).top_k == 20
    assert BenchmarkUse(name="aime24", top_k=20).changed_keys == {"top_k": 20}
    assert BenchmarkUse(name="aime24", form="chat", temperature=0.6, top_k=0, samples_per_prompt=64).changed_keys == {}
    assert BenchmarkUse(name="gsm8k", form="completion", limit=1).changed_keys == {"form": "completion", "limit": 1}


def model(
    name: str, rewards: Sequence[Sequence[float]], asked_in: str = "chat", benchmark: str = "gsm8k", **changed: object
) -> MeasuredModel:
    protocols = {benchmark: {"protocol": "p", "form": asked_in, "changed": changed}}
    return MeasuredModel(name=name, results=[replace(measured(rewards), name=benchmark)], protocols=protocols)


def test_models_are_compared_in_tables_and_json(tmp_path: Path) -> None:
    first, second = model("a", [[0, 0], [1, 0]]), model("b", [[1, 1], [1, 1]])
    text = json.dumps(results_json([first, second]), allow_nan=False)
    (tmp_path / "old.json").write_text(text)
    again = MeasuredModel.read(tmp_path / "old.json")
    assert results_json(again) == json.loads(text)
    [difference] = json.loads(text)["differences"]
    assert (difference["from"], difference["to"], difference["value"], difference["tasks"]) == ("a", "b", 0.75, 2)
    figures, compared = result_tables([first, second])
    assert [column.header for column in figures.columns] == ["benchmark", "figure", "tasks", "a", "b"]
    assert next(iter(compared.columns[1].cells)).startswith("+0.750 [")
    assert len(list(result_tables([first]))) == 1


def test_what_was_measured_otherwise_is_not_compared(tmp_path: Path) -> None:
    first = model("a", [[1, 1]])
    [entry] = score_differences(first, model("b", [[1, 1]], temperature=0.1))
    assert (entry["value"], entry["low"], entry["high"], entry["tasks"]) == (None, None, None, 0)
    assert entry["reason"] == "measured in different ways (temperature); measure both by one command"
    [entry] = score_differences(first, model("b", [[1, 1]], limit=1))
    assert (entry["value"], entry["reason"]) == (0, None)
    (tmp_path / "other.json").write_text('{"eval/avg": 1}')
    with pytest.raises(ConfigError, match="expected what `roll-like eval --benchmark"):
        MeasuredModel.read(tmp_path / "other.json")


def test_a_form_that_was_not_asked_for_is_no_change() -> None:
    plain = model("base", [[1, 1]], asked_in="completion")
    assert score_differences(plain, model("chat", [[1, 1]]))[0]["value"] == 0
    asked_so = model("b", [[1, 1]], asked_in="completion", form="completion")
    assert score_differences(plain, asked_so)[0]["value"] == 0
    [entry] = score_differences(model("chat", [[1, 1]]), asked_so)
    assert (entry["value"], str(entry["reason"])[:36]) == (None, "measured in different ways (form); m")


def cells(table: Table) -> list[list[str]]:
    return [list(map(str, column.cells)) for column in table.columns]


def test_differences_stand_with_their_models() -> None:
    several = [[1, 1], [0, 0]]
    first = model("a", several)
    first = replace(
        first,
        results=[*first.results, *model("a", several, benchmark="ifeval").results],
        protocols={**first.protocols, **model("a", several, benchmark="ifeval").protocols},
    )
    last = model("c", several, benchmark="ifeval")
    otherwise = model("d", several, benchmark="ifeval", top_p=0.5)
    [_, table] = result_tables([first, model("b", several), last, otherwise])
    names, *found = cells(table)
    assert names == ["gsm8k", "ifeval"]
    assert [[cell[:6] for cell in column] for column in found] == [["+0.000", "–"], ["–", "+0.000"], ["–", "–"]]
    assert str(table.caption) == "d, ifeval: measured in different ways (top_p); measure both by one command"


def test_a_difference_over_no_task_is_null() -> None:
    found = json.loads(json.dumps(results_json([model("a", [[1, 1]]), model("b", [])]), allow_nan=False))
    [entry] = found["differences"]
    assert (entry["value"], entry["tasks"], entry["reason"]) == (None, 0, "no task was scored for both")


class FakePipeline:
    """Answers one task of gsm8k rightly."""

    @staticmethod
    def measure(config: RLVRConfig, directory: str) -> tuple[dict[str, Metric], Collected]:
        asked.append((config.benchmarks[0].form, directory))
        if directory == "broken":
            raise ConfigError("it is broken")
        return {}, collected([group(task(0, source="benchmark/gsm8k"), [1.0])])


asked: list[tuple[str | None, str]] = []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    monkeypatch.setattr(RLVRConfig, "pipeline_class", lambda self: FakePipeline)
    monkeypatch.setattr(measure, "has_chat_template", lambda config: config.path != "base")
    monkeypatch.setattr(measure, "_in_its_window", lambda config, model: config)
    monkeypatch.setattr(measure, "refuse_bad_rows", lambda config, model: None)


def test_a_model_without_a_chat_template_is_compared(
    fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "results.json"
    arguments = ["eval", "--benchmark", "gsm8k", "--model", "base", "--model", "instruct", "-o", str(output)]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    assert asked == [("completion", "base"), (None, "instruct")]
    found = json.loads(output.read_text())
    assert [(one["benchmarks"][0]["form"], one["benchmarks"][0]["changed"]) for one in found["models"]] == [
        ("completion", {}),
        ("chat", {}),
    ]
    assert (found["differences"][0]["value"], found["differences"][0]["reason"]) == (0, None)


def test_rows_are_looked_through_before_engines_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.clear()
    monkeypatch.setattr(RLVRConfig, "pipeline_class", lambda self: FakePipeline)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")
    data = f"={tmp_path / 'rows.jsonl'}"
    command = ["eval", "--benchmark", "math500,aime25", "--data", f"math500{data}", "--data", f"aime25{data}"]
    assert cli.main([*command, "--model", str(tiny_model), "--max-response-tokens", "16"]) == 1
    told = capsys.readouterr().err
    assert f"error: math500, for {tiny_model}: " in told
    assert f"  aime25, for {tiny_model}: " in told
    assert "rows.jsonl:1: there is no field 'problem'" in told
    assert "give --data aime25=PATH with data of math-ai/aime25" in told
    assert asked == []


@pytest.mark.parametrize("place", ["window", "template"])
def test_all_models_are_looked_at_before_the_first_is_measured(
    place: str, tmp_path: Path, fake: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked_at: list[str] = []

    def refuse(config: RLVRConfig, model: str) -> None:
        looked_at.append(model)
        if place == "window" and model == "narrow":
            raise DataError("a prompt is too long")

    monkeypatch.setattr(measure, "refuse_bad_rows", refuse)
    monkeypatch.setattr(measure, "export_checkpoint", lambda checkpoint, output: looked_at.append(checkpoint.name))
    (tmp_path / "step_000010").mkdir()
    (tmp_path / "step_000010" / "manifest.json").write_text("{}")
    models = ["a", str(tmp_path / "step_000010"), "b", "narrow" if place == "window" else "base"]
    command = ["eval", "--benchmark", "gsm8k" if place == "window" else "ifeval"]
    assert cli.main([*command, *(f"--model={model}" for model in models)]) == (1 if place == "window" else 2)
    said = "a prompt is too long" if place == "window" else "base has no chat template, and ifeval asks in a chat"
    assert said in capsys.readouterr().err
    assert asked == []
    assert looked_at == (["a", "b", "narrow"] if place == "window" else ["a", "b"])  # the checkpoint's turn is later
    assert cli.main(["eval", "--benchmark", "gsm8k", *(f"--model={model}" for model in models[:3])]) == 0
    exported = looked_at.index("step_000010")
    assert looked_at[exported - 2 :] == ["a", "b", "step_000010", models[1]]
    assert [Path(directory).name for _, directory in asked] == ["a", "model", "b"]


def test_what_is_measured_is_kept(
    fake: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["eval", "--benchmark", "gsm8k", "--model", "a", "--model", "broken"]
    assert cli.main(command) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["models"][0]["model"] == "a"
    output = tmp_path / "results.json"
    assert cli.main([*command, "-o", str(output)]) == 2
    kept = output.read_text()
    assert json.loads(kept)["models"][0]["model"] == "a"
    asked.clear()
    for wrong in (
        str(output),
        str(tmp_path / "missing.json"),
    ):  # read before anything is measured, and not written over
        assert cli.main([*command[:-1], wrong, "-o", str(output)]) == 2
    assert (asked, output.read_text()) == ([], kept)

    def broken(*_: object) -> None:
        raise RuntimeError("no comparison")

    monkeypatch.setattr(measure, "results_json", broken)
    with pytest.raises(RuntimeError, match="no comparison"):
        cli.main(["eval", "--benchmark", "gsm8k", "--model", "b", "-o", str(output)])
    assert json.loads(output.read_text())["models"][0]["model"] == "b"  # written before it was compared
