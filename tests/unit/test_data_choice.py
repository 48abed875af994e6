"""Rows that name their domain, rows that are kept, and how often domains are drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_tokenizer  # type: ignore[import-not-found]

from roll_like.check.domains import taught_domains
from roll_like.config.data import DataSource
from roll_like.config.teachers import TeacherConfig, teacher_of, teacher_violations
from roll_like.data.chat import Renderer
from roll_like.data.tasks import TaskOrder, TaskSet, load_tasks
from roll_like.errors import CheckpointError, ConfigError, DataError


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(make_tiny_tokenizer())


#: Six rows of three domains, with a share of right answers as another run measured it.
ROWS: list[dict[str, Any]] = [
    {"prompt": f"row {at}", "data_source": domain, "extra": {"rate": rate}}
    for at, (domain, rate) in enumerate(
        [("math", 0.0), ("math", 0.5), ("code", 1.0), ("math", 0.25), ("stem", None), ("math", 0.75)]
    )
]


def load(renderer: Renderer, rows: list[dict[str, Any]] = ROWS, **settings: Any) -> TaskSet:
    return load_tasks([DataSource.model_validate({"rows": rows, "name": "mix", **settings})], renderer, 200)


def ids(tasks: TaskSet) -> list[str]:
    return [task.task_id for task in tasks]


def test_each_row_has_its_domain(renderer: Renderer) -> None:
    assert [task.domain for task in load(renderer)] == ["mix"] * 6
    assert [task.domain for task in load(renderer, domain="all")] == ["all"] * 6
    found = [task.domain for task in load(renderer, domain_field="data_source")]
    assert found == ["math", "math", "code", "math", "stem", "math"]


def test_a_domain_may_be_within_a_field(renderer: Renderer) -> None:
    """Tulu's `dataset` is a list in some rows."""
    rows = [{"prompt": "a", "dataset": ["gsm8k"], "info": {"task": "sums"}}]
    assert [task.domain for task in load(renderer, rows, domain_field="dataset.0")] == ["gsm8k"]
    assert [task.domain for task in load(renderer, rows, domain_field="info.task")] == ["sums"]


@pytest.mark.parametrize(
    ("value", "found"), [(None, "NoneType None"), (["gsm8k"], "list ['gsm8k']"), (3, "int 3"), (" ", "str ' '")]
)
def test_a_domain_is_a_text(renderer: Renderer, value: Any, found: str) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.0\.rows\[0\]: expected a text in 'kind', .* found") as caught:
        load(renderer, [{"prompt": "a", "kind": value}], domain_field="kind")
    assert found in caught.value.message


def test_a_field_that_is_not_there_is_named(renderer: Renderer) -> None:
    with pytest.raises(DataError, match=r"no field 'ability'; it has 'prompt', 'data_source'") as caught:
        load(renderer, domain_field="ability")
    assert caught.value.fix == "set data.sources.0.domain_field to the field that has it"
    with pytest.raises(DataError, match="no field 'level'"):
        load(renderer, where={"level": 3})


def test_rows_of_other_domains_may_have_no_answer(renderer: Renderer) -> None:
    rows = [{"prompt": "a", "kind": "math", "answer": "4"}, {"prompt": "b", "kind": "code", "answer": None}]
    rows += [{"prompt": "c", "kind": "code"}]
    tasks = load(renderer, rows, domain_field="kind", answer_field="answer")
    assert [task.answer for task in tasks] == ["4", None, None]
    with pytest.raises(DataError, match="expected a text or a number in 'answer', found NoneType None"):
        load(renderer, rows, answer_field="answer")


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"data_source": "math"}, [1, 2, 4, 6]),
        ({"data_source": ["code", "stem"]}, [3, 5]),
        ({"extra.rate": {"low": 0.25, "high": 0.75}}, [2, 4, 6]),  # bounds are within, null is not
        ({"extra.rate": {"low": 0.5}}, [2, 3, 6]),
        ({"extra.rate": {"high": 0.0}}, [1]),
        ({"data_source": "math", "extra.rate": {"low": 0.5}}, [2, 6]),
    ],
)
def test_where_keeps_rows_under_their_numbers(renderer: Renderer, where: dict[str, Any], kept: list[int]) -> None:
    tasks = load(renderer, where=where)
    assert ids(tasks) == [f"mix:{number}" for number in kept]
    [report] = tasks.report
    assert (report.rows, report.kept) == (6, len(kept))
    assert sum(left.count for left in report.left_out) == 6 - len(kept)


def test_what_where_leaves_out_is_counted(renderer: Renderer) -> None:
    [report] = load(renderer, where={"data_source": "math", "extra.rate": {"low": 0.5}}).report
    assert str(report) == (
        "mix: 2 of 6 rows; 2 with a 'data_source' that `where` does not keep left out, first data.sources.0.rows[2] "
        "(str 'code'); 2 with a 'extra.rate' that `where` does not keep left out, first data.sources.0.rows[0] (float "
        "0.0)"
    )


def test_values_keep_their_types(renderer: Renderer) -> None:
    """A number and a text are equal by the number, as in CSV; texts and truth values by themselves."""
    rows: list[dict[str, Any]] = [{"prompt": "a", "x": value} for value in (1, True, "1", 1.0, "1.0", "one", [1])]
    for wanted, kept in ((1, [1, 3, 4, 5]), (True, [2]), ("1", [1, 3, 4]), ("one", [6]), (["1.0", 2], [1, 4, 5])):
        assert ids(load(renderer, rows, where={"x": wanted})) == [f"mix:{number}" for number in kept]


def test_texts_of_tables_are_numbers_to_a_band(renderer: Renderer) -> None:
    rows = [{"prompt": "a", "x": "0.5"}, {"prompt": "b", "x": " 2 "}]
    assert ids(load(renderer, rows, where={"x": {"low": 1}})) == ["mix:2"]
    for value in ("hard", "nan", True, [1]):
        with pytest.raises(DataError, match=r"rows\[0\]: expected a number in 'x', for the band in `where`, found"):
            load(renderer, [{"prompt": "a", "x": value}], where={"x": {"low": 1}})


def test_where_that_keeps_nothing_says_what_there_is(renderer: Renderer) -> None:
    with pytest.raises(DataError, match=r"`where` keeps none of 6 rows; in 'data_source' there are str 'math' \(4\)"):
        load(renderer, where={"data_source": "maths"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domain": "a", "domain_field": "b"}, "domain and domain_field both say"),
        ({"domain_weights": {"a": 1}}, "of the domains that `domain_field` finds"),
        ({"domain_field": "a", "domain_weights": {"a": 1}, "streaming": True}, "choose among all rows"),
        ({"where": {"x": {"low": 2, "high": 1}}}, "the band is empty: low is 2, high is 1"),
        ({"where": {"x": {}}}, "a band without low and high leaves nothing out"),
        ({"where": {"x": []}}, r"found \[\]; expected a list of 1 or more"),
        *(
            (
                {"where": {"x": value}},
                rf"^where\.x: {found}expected a text, a number, true or false, a list of these, or a band of "
                r"numbers with `low` and `high` \[",
            )
            for value, found in (
                (None, ""),
                ([None], r"found \[null\]; "),
                ({"min": 2}, r'found \{"min": 2\}; '),
            )
        ),
    ],
)
def test_mistakes_in_a_source(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSource.model_validate({"path": "x.jsonl", **settings})


def drawn(tasks: TaskSet, count: int, **settings: Any) -> Counter[str]:
    order = TaskOrder(tasks, seed=3, **settings)
    return Counter(order.next().domain for _ in range(count))


def test_domains_are_drawn_by_their_weights(renderer: Renderer) -> None:
    weighted = load(renderer, domain_field="data_source", domain_weights={"math": 1, "code": 2, "stem": 0.5})
    assert drawn(weighted, 700) == {"math": 200, "code": 400, "stem": 100}
    assert drawn(load(renderer, domain_field="data_source"), 600) == {"math": 400, "code": 100, "stem": 100}


def test_weights_of_domains_share_the_weight_of_their_source(renderer: Renderer) -> None:
    mixed = {"rows": ROWS, "name": "mix", "weight": 3, "domain_field": "data_source"}
    mixed["domain_weights"] = {"math": 1, "code": 1, "stem": 1}
    other = {"rows": [{"prompt": "other"}], "name": "other", "weight": 1}
    tasks = load_tasks([DataSource.model_validate(each) for each in (mixed, other)], renderer, 200)
    assert drawn(tasks, 400) == {"math": 100, "code": 100, "stem": 100, "other": 100}


def test_every_task_of_a_domain_comes_before_any_comes_again(renderer: Renderer) -> None:
    tasks = load(renderer, domain_field="data_source", domain_weights={"math": 1, "code": 1, "stem": 1})
    order = TaskOrder(tasks, seed=0)
    maths = [task.task_id for task in order.take(24) if task.domain == "math"]
    assert len(maths) == 8
    assert sorted(maths[:4]) == sorted(maths[4:]) == ["mix:1", "mix:2", "mix:4", "mix:6"]


def test_an_order_with_weights_resumes(renderer: Renderer) -> None:
    weights = {"math": 3, "code": 2, "stem": 1}
    tasks = load(renderer, domain_field="data_source", domain_weights=weights)
    order = TaskOrder(tasks, seed=0)
    order.take(17)
    state = json.loads(json.dumps(order.state()))
    expected = [task.task_id for task in order.take(40)]
    again = TaskOrder(tasks, seed=0)
    again.load_state(state)
    assert [task.task_id for task in again.take(40)] == expected
    assert again.find("mix:5").domain == "stem"
    changed = load(renderer, domain_field="data_source", domain_weights={**weights, "stem": 2})
    with pytest.raises(CheckpointError, match="the data changed since the checkpoint"):
        TaskOrder(changed, seed=0).load_state(state)


def test_weights_are_of_the_domains_that_there_are(renderer: Renderer) -> None:
    with pytest.raises(DataError, match=r"^`rows`: there is no weight for the domains stem \(1\)") as caught:
        load(renderer, domain_field="data_source", domain_weights={"math": 1, "code": 1})
    assert (
        caught.value.fix == "add them to data.sources.0.domain_weights, or leave their rows out by data.sources.0.where"
    )
    with pytest.raises(DataError, match=r"no row is of the domain 'maths'; there are math \(4\), code \(1\)"):
        load(renderer, domain_field="data_source", domain_weights={"maths": 1})
    with pytest.raises(DataError, match=r"no row that `where` keeps is of the domain 'stem'; there are math \(4\)"):
        load(
            renderer,
            domain_field="data_source",
            domain_weights={"math": 1, "stem": 1},
            where={"data_source": "math"},
        )
    long: list[dict[str, Any]] = [*ROWS, *({"prompt": "word " * 300, "data_source": "long"} for _ in range(2))]
    weights = {"math": 1, "code": 1, "stem": 1, "long": 1}
    with pytest.raises(DataError, match=r"all 2 prompts of the domain 'long' are longer than data\.max_prompt_tokens"):
        load(renderer, long, domain_field="data_source", domain_weights=weights)
    kept = load(
        renderer,
        domain_field="data_source",
        domain_weights={"math": 1, "code": 1},
        where={"data_source": ["math", "code"]},
    )
    assert drawn(kept, 100) == {"math": 50, "code": 50}


def test_rows_that_are_streamed_have_domains_and_are_chosen(renderer: Renderer, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    rows = [{"prompt": f"row {at}", "kind": "odd" if at % 2 else "even", "level": at} for at in range(100)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    source = {"path": str(file), "streaming": True, "stream_block": 8, "domain_field": "kind"}
    tasks = load_tasks([DataSource.model_validate({**source, "where": {"level": {"low": 40}}})], renderer, 200)
    order = TaskOrder(tasks, seed=0)
    found = order.take(60)
    assert sorted(task.metadata["level"] for task in found) == list(range(40, 100))
    assert all(task.task_id == f"many:{task.metadata['level'] + 1}" for task in found)
    assert {task.domain for task in found} == {"odd", "even"}
    assert order.find("many:78").metadata["level"] == 77


def test_rows_that_are_kept_may_come_late_in_a_stream(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before a run reads on until it has its rows, within a bound."""
    file = tmp_path / "sorted.jsonl"
    rows = [{"prompt": f"row {at}", "kind": "b" if at >= 2000 else "a"} for at in range(4000)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    source = DataSource(path=str(file), streaming=True, where={"kind": "b"})
    [report] = load_tasks([source], renderer, 200).report
    assert (report.rows, report.kept) == (3024, 1024)
    monkeypatch.setattr("roll_like.data.tasks.MOST_ROWS", 2000)
    with pytest.raises(DataError, match=r"keeps none of the first 2000 rows; in 'kind' there are str 'a'") as caught:
        load_tasks([source], renderer, 200)
    assert "the others are not read before a run" in (caught.value.fix or "")


def test_keys_that_are_not_set_leave_the_fingerprint_of_a_stream(renderer: Renderer, tmp_path: Path) -> None:
    """Checkpoints from before `domain_field`, `domain_weights` and `where` are continued."""
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n', "utf-8")
    values = {"path": str(file), "streaming": True, "answer_field": "answer"}

    def settings(**changes: Any) -> str:
        [source] = load_tasks([DataSource.model_validate(values | changes)], renderer, 200).sources
        assert source.stream is not None
        return source.stream.settings

    before = (
        f'{{"path":"{file}","rows":null,"name":null,"subset":null,"split":"train","revision":null,"streaming":true,'
        '"stream_block":4096,"weight":1.0,"prompt_field":"prompt","system_prompt":null,"images_field":"images",'
        '"transcripts":false,"domain":null,"answer_field":"answer","answer_after":null,"answer_boxed":false}'
    )
    assert settings() == f"{before} 200 {renderer.fingerprint}"
    assert '"where":{"answer":"b"}' in settings(where={"answer": "b"})


def test_an_answer_that_no_row_has_is_an_error(renderer: Renderer) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "kind": "math", "answer": "4"}, {"prompt": "b", "kind": "code"}]
    with pytest.raises(DataError, match=r"none of 2 rows has an answer in 'ansewr'; .* 'kind', 'answer'") as caught:
        load(renderer, rows, domain_field="kind", answer_field="ansewr")
    assert caught.value.fix is not None
    assert caught.value.fix.startswith("correct data.sources.0.answer_field, or set it to null")


def test_teachers_of_domains_that_rows_name(renderer: Renderer) -> None:
    sources = [DataSource.model_validate({"rows": ROWS, "name": "mix", "domain_field": "data_source"})]

    def found(**domains: list[str] | None) -> list[str]:
        teachers = {name: TeacherConfig(path="x", domains=of) for name, of in domains.items()}
        assert list(teacher_violations(teachers, [source.domain_label for source in sources], 1, "")) == []
        return [str(each) for each in taught_domains(teachers, sources, load_tasks(sources, renderer, 200).sources)]

    assert found(one=["math", "code", "stem"]) == found(one=["math"], rest=None) == []
    [orphans] = found(one=["math"], two=["code"])
    assert orphans.startswith("error: teachers: no teacher covers the domains stem; ")
    [unknown] = found(one=["maths"], rest=None)
    assert unknown.startswith("error: teachers.one.domains: no data is of domain 'maths'; there are code, math, stem")
    with pytest.raises(ConfigError, match="no teacher covers the domain 'stem'"):
        teacher_of({"one": TeacherConfig(path="x", domains=("math",))}, "stem")
