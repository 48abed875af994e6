"""Benchmarks as tasks: what their files say, what is asked of a tokenizer, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import MINIMAL
from tiny_model import make_tiny_tokenizer

from roll_like import cli
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.config.benchmarks import BenchmarkUse, benchmark_names, chosen_benchmarks, read_benchmark
from roll_like.data.benchmark_tasks import benchmark_tasks
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError, DataError
from roll_like.registry import REWARDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation_benchmarks.md").read_text(encoding="utf-8")
OWN = re.search(r"^```yaml\n(title: Capitals.*?)^```", PAGE, flags=re.M | re.S)
ROW = {"country": "Chad", "capital": "N'Djamena"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The benchmark of the page, with a row."""
    assert OWN is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "capitals.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "capitals.yaml").write_text(OWN[1])
    return tmp_path / "capitals.yaml"


def renderer() -> Renderer:
    return Renderer(make_tiny_tokenizer())


@pytest.mark.parametrize("name", benchmark_names())
def test_the_page_says_what_the_files_say(name: str) -> None:
    found = read_benchmark(name)
    assert f"| `{name}` | [{found.protocol}]({found.source})" in PAGE
    assert found.licence in PAGE
    assert all(f"    - {text}" in PAGE for text in found.differs)
    for grader in BenchmarkUse(name=name).rewards():
        REWARDS.get(grader.type)(grader).close()


def test_the_command_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(";", " ").split()
    assert set(benchmark_names()) <= set(words)


def test_a_chat_and_a_plain_text(own: Path) -> None:
    question = "What is the capital of France?\nIt is Paris.\n\nWhat is the capital of Chad?\n"
    tokens = renderer()
    [chat] = benchmark_tasks(BenchmarkUse(name=str(own)), tokens, "key")
    assert tokens.decode(chat.prompt_ids) == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    [plain] = benchmark_tasks(BenchmarkUse(name=str(own), form="completion"), tokens, "key")
    assert tokens.decode(plain.prompt_ids) == question
    assert (chat.answer, chat.source, chat.domain) == ("N'Djamena", "benchmark/capitals", "benchmark/capitals")
    assert chat.metadata == ROW


def test_the_example_asks_what_other_evaluators_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    folder = Path("examples") / "other_evaluators"
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    text = yaml.safe_load((folder / "sums.yaml").read_text())["doc_to_text"]
    tasks = benchmark_tasks(BenchmarkUse(name=str(folder / "sums_benchmark.yaml")), renderer(), "key")
    asked = [text.replace("{{question}}", row["question"]) for row in rows]
    assert [one.messages[0]["content"] for one in tasks] == asked
    assert [one.answer for one in tasks] == [row["answer"] for row in rows]


def test_plain_text_begins_as_the_tokenizer_begins_it(own: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokens = renderer()
    pieces = [("<pad>", tokens.tokenizer.convert_tokens_to_ids("<pad>"))]
    tokens.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", pair=None, special_tokens=pieces
    )
    [plain] = benchmark_tasks(BenchmarkUse(name=str(own), form="completion"), tokens, "key")
    assert tokens.decode(plain.prompt_ids).startswith("<pad>What is the capital of France?")
    [chat] = benchmark_tasks(BenchmarkUse(name=str(own)), tokens, "key")
    assert tokens.decode(chat.prompt_ids).startswith("<|im_start|>user\n")


def test_an_answer_may_have_begun(tmp_path: Path) -> None:
    row = {"prompt": "def f():\n", "test": "def check(candidate): assert candidate() == 1", "entry_point": "f"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    tokens = renderer()
    [task] = benchmark_tasks(BenchmarkUse(name="humaneval_instruct", path=str(tmp_path)), tokens, "key")
    assert tokens.decode(task.prompt_ids).endswith(
        "<|im_start|>assistant\nHere is the completed function:\n```python\ndef f():\n\n"
    )


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"country": "Chad"}], {}, r"capitals.jsonl:1: there is no field 'capital'; it has 'country'.*has rows with"),
        ([{"country": "Chad", "capital": 3}], {}, "expected text in 'capital', found int 3"),
        ([{"country": "Chad", "capital": None}], {}, "expected text in 'capital', found None"),
        ([], {}, "holds no rows"),
        ([ROW], {"max_prompt_tokens": 3}, "has [0-9]+ tokens, above its limit of 3, and a benchmark leaves no row out"),
    ],
)
def test_rows_of_another_schema(rows: list[Any], changes: dict[str, Any], message: str, own: Path) -> None:
    (own.parent / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message) as raised:
        benchmark_tasks(BenchmarkUse(name=str(own), **changes), renderer(), "evaluation.benchmarks.0")
    assert "evaluation.benchmarks.0" in str(raised.value)


def subset_rows(folder: Path, **subsets: list[dict[str, Any]]) -> Path:
    """Write the page's benchmark with rows of subsets as on the hub."""
    assert OWN is not None
    text = yaml.safe_load(OWN[1]) | {"path": str(folder / "rows"), "subsets": sorted(subsets)}
    text["columns"] |= {"subset": "text", "known": "text"}
    text |= {"where": {"known": "yes"}, "prompt": "{{subset}}: {{country}}?"}
    for subset, rows in subsets.items():
        (folder / "rows" / subset).mkdir(parents=True)
        lines = [json.dumps({"known": "yes", "capital": "x", **row}) for row in rows]
        (folder / "rows" / subset / "test-00000-of-00001.jsonl").write_text("\n".join(lines))
    (folder / "capitals.yaml").write_text(yaml.safe_dump(text | {"shots": None}))
    return folder / "capitals.yaml"


def test_rows_of_subsets_come_in_turn(tmp_path: Path) -> None:
    file = subset_rows(
        tmp_path,
        africa=[{"country": "Chad"}, {"country": "Wadai", "known": "no"}, {"country": "Mali"}],
        asia=[{"country": "Laos"}],
    )
    for place in (None, str(tmp_path / "rows")):
        tasks = benchmark_tasks(BenchmarkUse(name=str(file), path=place), renderer(), "key")
        assert [one.messages[0]["content"] for one in tasks] == ["africa: Chad?", "asia: Laos?", "africa: Mali?"]
    assert [one.task_id for one in tasks][1:] == ["benchmark/capitals:asia:2", "benchmark/capitals:africa:3"]
    [first, second] = benchmark_tasks(BenchmarkUse(name=str(file), limit=2), renderer(), "key")
    assert (first.metadata["subset"], second.metadata["subset"]) == ("africa", "asia")


def test_a_file_names_its_subsets(tmp_path: Path) -> None:
    file = subset_rows(tmp_path, africa=[{"country": "Chad"}])
    one = tmp_path / "one.jsonl"
    row = {"country": "Mali", "capital": "Bamako", "known": "yes"}
    one.write_text(json.dumps(row | {"subset": "africa"}))
    [task] = benchmark_tasks(BenchmarkUse(name=str(file), path=str(one)), renderer(), "key")
    assert task.messages[0]["content"] == "africa: Mali?"
    one.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"no field 'subset'.*\n.*set key.path to data of .* with a directory for each"):
        benchmark_tasks(BenchmarkUse(name=str(file), path=str(one)), renderer(), "key")
    one.write_text(json.dumps(row | {"subset": "africa", "known": "no"}))
    with pytest.raises(
        DataError, match=r"holds no rows with known: yes\n.*correct `where` in the benchmark's file, or set"
    ):
        benchmark_tasks(BenchmarkUse(name=str(file), path=str(one)), renderer(), "key")
    (tmp_path / "rows" / "africa").rename(tmp_path / "rows" / "afrika")
    with pytest.raises(DataError, match="has no subset 'africa', which would be a directory in it") as raised:
        benchmark_tasks(BenchmarkUse(name=str(file)), renderer(), "key")
    assert raised.value.fix is not None
    assert raised.value.fix.startswith("set key.path to data of ")
    assert raised.value.fix.endswith("that has the split 'test' of the subset 'africa'")


def test_examples_of_a_split_that_is_not_there(tmp_path: Path) -> None:
    row = {"question": "2+2?", "options": ["3", "4"], "answer": "B", "category": "math", "cot_content": ""}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "validation.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"needs 5 examples with category: str 'math' of split .*, and there are 1"):
        benchmark_tasks(BenchmarkUse(name="mmlu_pro", path=str(tmp_path)), renderer(), "key")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("gsm9k", "no benchmark is called 'gsm9k'; did you mean 'gsm8k'"),
        ("nowhere.yaml", "nowhere.yaml"),
        ({"name": "gsm8k", "samples_per_prompt": 2}, "at temperature 0 all 2 samples of a prompt are equal"),
        ({"name": "gsm8k", "shots": 3}, "shots"),
    ],
)
def test_wrong_benchmarks(use: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RLVRConfig.model_validate({**MINIMAL, "evaluation": {"benchmarks": [use]}})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prompt: '{{country'", "is no Jinja template"),
        ("graders: [{type: exact_mach}]", "exact_mach"),
        ("columns: {country: word}", "columns"),
        ("shots: {answer: x}", "set either `rows` or `split`"),
        ("shots: {answer: x, split: train}", "`split` and `count`"),
        ("{subset: a, subsets: [b]}", "set either `subset` or `subsets`"),
        ("where: {capital: x}\ncolumns: {country: text, capital: number}", "`columns` has 'capital' as 'number'; name"),
        ("subsets: [africa]", "add `subset: text` to `columns`"),
        ("where: {continent: Africa}", "`where` names 'continent', which is not in `columns`; add it there"),
    ],
)
def test_a_wrong_file_is_explained_with_its_line(line: str, message: str, own: Path) -> None:
    own.write_text(yaml.safe_dump(yaml.safe_load(own.read_text()) | yaml.safe_load(line)))
    with pytest.raises(ConfigError, match=message) as raised:
        read_benchmark(str(own))
    assert "capitals.yaml" in str(raised.value)


def test_a_run_has_room_for_its_benchmarks() -> None:
    evaluation = {"benchmarks": [{"name": "gsm8k", "max_response_tokens": 100}]}
    config = RLVRConfig.model_validate({**MINIMAL, "evaluation": evaluation})
    assert config.context_window == 2148
    assert config.longest_evaluated == (2148, "evaluation.benchmarks: max_prompt_tokens + max_response_tokens = 2148")
    assert config.domain_rewards["benchmark/gsm8k"] == (
        "benchmark/gsm8k/strict_match",
        "benchmark/gsm8k/flexible_extract",
    )
    assert [getattr(one, "weight", None) for one in config.scoring][-2:] == [1.0, 0.0]
    with pytest.raises(ConfigError, match="it measures nothing"):
        RLVRConfig.model_validate({**MINIMAL, "evaluation": {"every": 5}})
    with pytest.raises(ConfigError, match="two benchmarks are called 'gsm8k'"):
        RLVRConfig.model_validate({**MINIMAL, "evaluation": {"benchmarks": ["gsm8k", "gsm8k"]}})


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ({"temperature": 0.5}, "set `temperature` of each benchmark"),
        ({"temperature": 0}, "set `temperature` of each benchmark"),
        ({"top_p": 0.9}, "set `top_p` of each benchmark"),
        ({"top_k": 9}, "set `top_k` of each benchmark"),
        ({"min_p": 0.1}, "bound the benchmarks by their `top_p` or `top_k`"),
        ({"stop": ["x"]}, "set `sampling.stop` in a benchmark's YAML file"),
        ({"samples_per_prompt": 2}, "set `samples_per_prompt` of each benchmark"),
        ({"max_tasks": 2}, "set `limit` of each benchmark"),
        ({"max_response_tokens": 2}, "set `max_response_tokens` of each benchmark"),
    ],
)
def test_keys_of_an_evaluation_s_own_sources_need_some(changes: dict[str, Any], instead: str) -> None:
    [key] = changes
    with pytest.raises(ConfigError) as raised:
        RLVRConfig.model_validate({**MINIMAL, "evaluation": {"benchmarks": ["gsm8k"], **changes}})
    message = str(raised.value)
    assert f"evaluation.{key}: has no effect: it is for evaluation.sources, and there are none" in message
    assert f"remove it and {instead}" in message
    assert "are equal" not in message
    sources = [{"rows": [{"prompt": "."}]}]
    both = {"benchmarks": ["gsm8k"], "sources": sources, "samples_per_prompt": 1, **changes}
    RLVRConfig.model_validate({**MINIMAL, "evaluation": both})


def test_places_of_a_command_line() -> None:
    assert chosen_benchmarks(["gsm8k,ifeval"], ["ifeval=/data"], {"limit": 3, "form": None}) == [
        {"name": "gsm8k", "limit": 3},
        {"name": "ifeval", "limit": 3, "path": "/data"},
    ]
    for place in ("math500=/x", "gsm8k"):
        with pytest.raises(ConfigError, match="expected NAME=PATH with one of the benchmarks gsm8k"):
            chosen_benchmarks(["gsm8k"], [place], {})


@pytest.mark.parametrize("option", ["--limit=3", "--data=gsm8k=x", "-o=x.json", "--temperature=0", "--form=chat"])
def test_options_of_benchmarks_need_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--config", "x.yaml", "--model", "m", option]) == 2
    assert "belongs to benchmarks" in capsys.readouterr().err
