"""Given data is tokenised once: what is kept of it, in this process and on disk, and when it is made anew."""

from __future__ import annotations

import json
import os
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import make_tiny_tokenizer

from roll_like.builtin.pipelines.dpo.config import LabelledData
from roll_like.builtin.pipelines.dpo.labelled_data import load_labelled
from roll_like.builtin.pipelines.reward_model.config import ScoredAnswerData, ScoredPairData
from roll_like.builtin.pipelines.reward_model.scored_answers import load_scored_answers
from roll_like.builtin.pipelines.reward_model.scored_pairs import load_scored_pairs
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.builtin.pipelines.sft.pipeline import SFTPipeline
from roll_like.config.data import ConversationData, PairData
from roll_like.data import kept_samples, tokenise
from roll_like.data.chat import Renderer
from roll_like.data.conversations import ConversationReader, load_conversations
from roll_like.data.packed import PackedSamples
from roll_like.data.pairs import load_pairs
from roll_like.data.rows import read_rows
from roll_like.data.token_cache import TokenCache
from roll_like.errors import DataError

ROWS = 600


@pytest.fixture
def render() -> Renderer:
    return Renderer(make_tiny_tokenizer())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of a tokenizer got."""
    seen: list[int] = []
    encode = Renderer.encode_pieces

    def counted(self: Renderer, pieces: Any) -> Any:
        seen.append(len(pieces))
        return encode(self, pieces)

    monkeypatch.setattr(Renderer, "encode_pieces", counted)
    monkeypatch.setattr(kept_samples, "_REMEMBERED", {})
    return seen


def forget() -> None:
    """As a new process would."""
    kept_samples._REMEMBERED.clear()


def write(file: Path, count: int = ROWS, **further: Any) -> Path:
    rows = [
        {"prompt": f"{n}?", "completion": f"It is {n}.", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(count)
    ]
    file.write_text("".join(json.dumps({**row, **further}) + "\n" for row in rows))
    return file


def data_of(file: Path, cache: Path, **settings: Any) -> ConversationData:
    source = {"path": str(file), **settings.pop("source", {})}
    return ConversationData(sources=[source], cache_dir=cache, **settings)


def test_one_process_tokenises_once_and_the_next_one_reads_what_is_kept(
    tmp_path: Path, render: Renderer, calls: list[int]
) -> None:
    data = data_of(write(tmp_path / "rows.jsonl"), tmp_path / "cache")
    first = load_conversations(data, render)
    tokenised = len(calls)
    assert tokenised == 2  # 512 and 88 rows
    again = load_conversations(data, Renderer(make_tiny_tokenizer()))
    forget()
    kept = load_conversations(data, render)
    assert len(calls) == tokenised
    (entry,) = (tmp_path / "cache" / "data").iterdir()
    for other in (again, kept):
        assert other.report == first.report
        assert other.fingerprint == first.fingerprint
        for one, two in zip(first, other, strict=True):
            assert one.content() == two.content()
            assert (one.origin, one.part) == (two.origin, two.part)
            assert two.token_ids.flags.writeable
    assert isinstance(kept.sources[0].items, PackedSamples)
    assert isinstance(kept.sources[0].items.columns["token_ids"], np.memmap)
    assert kept.sources[0].items[-1].origin == f"{tmp_path}/rows.jsonl:{ROWS}"
    assert (entry / "meta.json").is_file()


CHANGES: dict[str, Any] = {
    "a row": lambda data, file: write(file, count=ROWS, completion="No."),
    "a file of the same size and time": lambda data, file: _same_size(file),
    "the limit": {"max_tokens": 24},
    "which turns": {"train_on": "last"},
    "what is left out": {"too_long": "cut"},
    "a field": {"source": {"prompt_field": "completion", "completion_field": "prompt"}},
    "a system prompt": {"source": {"system_prompt": "Be brief."}},
}


def _same_size(file: Path) -> None:
    stat, text = file.stat(), file.read_text()
    part = file.with_suffix(".part")
    part.write_text(text.replace("It is 7.", "It is 8."))
    os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    part.replace(file)


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_whatever_decides_about_tokens_is_part_of_the_key(
    change: Any, tmp_path: Path, render: Renderer, calls: list[int]
) -> None:
    file = write(tmp_path / "rows.jsonl")
    load_conversations(data_of(file, tmp_path / "cache"), render)
    before = len(calls)
    if callable(change):
        change(None, file)
        change = {}
    load_conversations(data_of(file, tmp_path / "cache", **change), render)
    assert len(calls) > before


def test_the_template_and_the_tokenizer_are_part_of_the_key(tmp_path: Path, render: Renderer, calls: list[int]) -> None:
    data = data_of(write(tmp_path / "rows.jsonl"), tmp_path / "cache")
    load_conversations(data, render)
    other = make_tiny_tokenizer()
    other.chat_template = other.chat_template.replace("\n", " ")
    grown = make_tiny_tokenizer()
    grown.add_tokens(["It is"])
    for changed in (Renderer(other), Renderer(grown), Renderer(make_tiny_tokenizer(), template_options={"a": 1})):
        before = len(calls)
        load_conversations(data, changed)
        assert len(calls) > before
    # what calls leave behind in a tokenizer is not: padding and truncation
    used = make_tiny_tokenizer()
    used(["a", "b b b"], padding=True, truncation=True, max_length=4)
    before = len(calls)
    load_conversations(data, Renderer(used))
    assert len(calls) == before


def test_name_and_weight_are_not(tmp_path: Path, render: Renderer, calls: list[int]) -> None:
    file = write(tmp_path / "rows.jsonl")
    load_conversations(data_of(file, tmp_path / "cache"), render)
    before = len(calls)
    named = load_conversations(data_of(file, tmp_path / "cache", source={"name": "other", "weight": 3.0}), render)
    assert len(calls) == before
    assert (named.sources[0].name, named.report[0].name, named.sources[0].weight) == ("other", "other", 3.0)


def test_every_kind_of_sample_comes_back_as_it_was(tmp_path: Path, render: Renderer, calls: list[int]) -> None:
    file, cache = write(tmp_path / "rows.jsonl", label=False, lead=0.25), tmp_path / "cache"
    loads = {
        load_pairs: PairData(sources=[{"path": str(file)}], cache_dir=cache),
        load_scored_pairs: ScoredPairData(sources=[{"path": str(file), "margin_field": "lead"}], cache_dir=cache),
        partial(load_scored_answers, loss="mse"): ScoredAnswerData(
            sources=[{"path": str(file), "score_field": "lead"}], cache_dir=cache
        ),
        load_labelled: LabelledData(sources=[{"path": str(file)}], cache_dir=cache),
    }
    for load, data in loads.items():
        first = list(load(data, render))  # type: ignore[operator]
        forget()
        before = len(calls)
        kept = list(load(data, render))  # type: ignore[operator]
        assert len(calls) == before
        for one, two in zip(first, kept, strict=True):
            assert type(one) is type(two)
            assert one.content() == two.content()
            assert [each.origin for each in one.sequences] == [each.origin for each in two.sequences]
    assert kept[0].desirable is False


def _zero(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


#: What happens to an entry's files, each of which must be noticed: a size alone does not tell.
DAMAGE: dict[str, Any] = {
    "cut": lambda entry: os.truncate(entry / "token_ids", 100),
    "zeros, after a loss of power": lambda entry: _zero(entry / "token_ids"),
    "zeros in what is trained": lambda entry: _zero(entry / "trained"),
    "no column": lambda entry: (entry / "origins").unlink(),
    "no facts": lambda entry: (entry / "meta.json").unlink(),
    "half of the facts": lambda entry: (entry / "meta.json").write_text("{"),
    "other facts": lambda entry: (entry / "meta.json").write_text("[]"),
    "facts changed": lambda entry: (entry / "meta.json").write_text(
        (entry / "meta.json").read_text().replace('"left_out"', '"left"')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_anew(damage: str, tmp_path: Path, render: Renderer, calls: list[int]) -> None:
    data = data_of(write(tmp_path / "rows.jsonl"), tmp_path / "cache")
    fingerprint = load_conversations(data, render).fingerprint
    (entry,) = (tmp_path / "cache" / "data").iterdir()
    DAMAGE[damage](entry)
    forget()
    before = len(calls)
    assert load_conversations(data, render).fingerprint == fingerprint
    assert len(calls) == before + 2  # once
    forget()
    assert load_conversations(data, render).fingerprint == fingerprint
    assert len(calls) == before + 2  # and what was made is kept


def test_what_ends_a_response_by_the_models_files_is_part_of_a_renderers_fingerprint(render: Renderer) -> None:
    one, two, same = (Renderer(make_tiny_tokenizer(), stated_ends=ends) for ends in ([5], [5, 7], [7, 5]))
    assert None not in (one.fingerprint, two.fingerprint)
    assert len({render.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert two.fingerprint == same.fingerprint


def test_a_file_written_in_place_with_its_old_time_is_read_again(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl", completion="old")
    data, times = data_of(file, tmp_path / "cache"), file.stat()
    old = load_conversations(data, render)
    write(file, completion="new")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    assert load_conversations(data, render).fingerprint != old.fingerprint


def test_what_a_killed_process_left_is_not_read_and_goes_after_a_day(tmp_path: Path, render: Renderer) -> None:
    cache = tmp_path / "cache" / "data"
    for name, age in (("old", 25), ("new", 1)):
        (cache / f".part-{name}").mkdir(parents=True)
        (cache / f".part-{name}" / "token_ids").write_bytes(b"1")
        then = time.time() - age * 3600
        os.utime(cache / f".part-{name}" / "token_ids", (then, then))
    load_conversations(data_of(write(tmp_path / "rows.jsonl"), tmp_path / "cache"), render)
    assert sorted(entry.name for entry in cache.iterdir())[0] == ".part-new"
    assert len(list(cache.iterdir())) == 2


def test_two_processes_that_make_one_entry(tmp_path: Path, render: Renderer) -> None:
    file = write(tmp_path / "rows.jsonl")
    load_conversations(data_of(file, tmp_path / "cache"), render)
    cache = TokenCache(tmp_path / "cache", 2**30)
    (entry,) = cache.folder.iterdir()
    part = cache.begin()
    for column in entry.iterdir():
        (part / column.name).write_bytes(column.read_bytes())
    assert cache.keep(part, entry.name, {}) == entry
    assert list(cache.folder.iterdir()) == [entry]


def test_the_folder_keeps_what_was_used_last(tmp_path: Path, render: Renderer) -> None:
    files = [write(tmp_path / f"{n}.jsonl", completion=f"No {n}.") for n in range(3)]
    for file in files:
        load_conversations(data_of(file, tmp_path / "cache"), render)
        time.sleep(0.01)
    folder = tmp_path / "cache" / "data"
    assert len(list(folder.iterdir())) == 3
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 3 / 2**30
    forget()
    load_conversations(data_of(files[0], tmp_path / "cache"), render)  # now the last one used
    load_conversations(data_of(write(tmp_path / "3.jsonl"), tmp_path / "cache", cache_gib=2.5 * size), render)
    assert len(list(folder.iterdir())) == 2
    assert TokenCache(tmp_path / "cache", 1).find("nothing") is None


def test_few_rows_and_no_cache(tmp_path: Path, render: Renderer, calls: list[int]) -> None:
    load_conversations(data_of(write(tmp_path / "few.jsonl", 500), tmp_path / "cache"), render)
    load_conversations(data_of(write(tmp_path / "many.jsonl"), tmp_path / "cache", cache_gib=0), render)
    assert not list(tmp_path.glob("cache/data/*"))


def test_a_folder_that_cannot_be_written_is_said_and_costs_nothing_else(
    tmp_path: Path, render: Renderer, calls: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    data = data_of(write(tmp_path / "rows.jsonl"), tmp_path / "cache")
    assert len(load_conversations(data, render)) == ROWS
    assert "set data.cache_dir to a folder that can be written" in capsys.readouterr().err
    before = len(calls)
    load_conversations(data, render)
    assert len(calls) == before


def test_several_processes_give_the_same(
    tmp_path: Path, render: Renderer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where rows are bad, and in the order of the rows."""
    rows = [{"prompt": f"{n}?", "completion": "" if n % 50 == 3 else f"It is {n}."} for n in range(2000)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of(file, tmp_path / "cache", bad_rows="skip", cache_gib=0)
    alone = load_conversations(data, render)
    forget()
    monkeypatch.setattr(tokenise, "_FIRST_ROWS", 512)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    several = load_conversations(data, render)
    assert several.report == alone.report
    assert several.report[0].left_out[0].count == 40
    assert several.fingerprint == alone.fingerprint
    assert [each.origin for each in several] == [each.origin for each in alone]
    with pytest.raises(DataError, match=r"rows.jsonl:4: "):
        load_conversations(data_of(file, tmp_path / "cache", cache_gib=0), render)
    later = "".join(json.dumps({**row, "completion": "" if n == 1234 else "x"}) + "\n" for n, row in enumerate(rows))
    file.write_text(later)
    with pytest.raises(DataError, match=r"rows.jsonl:1235: "):
        load_conversations(data_of(file, tmp_path / "cache", cache_gib=0), render)


def test_a_process_that_is_lost_is_an_error(tmp_path: Path, render: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.jsonl")
    data = data_of(file, tmp_path)
    reader = ConversationReader(source=data.sources[0], key="data.sources.0", limits=data, section="data")
    job = tokenise.TokeniseJob(reader, render)
    monkeypatch.setattr(tokenise, "_FIRST_ROWS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(tokenise, "_pickled", lambda job: pickle.dumps(None))  # no job: it fails
    with pytest.raises(DataError, match=r"a process that tokenises rows ended with code 1 at .*rows.jsonl:1"):
        list(tokenise.tokenised(read_rows(data.sources[0], "s"), job))


def test_a_run_tokenises_once_for_its_check_its_steps_and_itself(
    tmp_path: Path, tiny_model: Path, calls: list[int]
) -> None:
    rows = write(tmp_path / "rows.jsonl", 60)
    config = SFTConfig(
        model={"path": str(tiny_model)},
        epochs=2,
        data={"sources": [{"path": str(rows)}], "samples_per_step": 7},
        evaluation={"sources": [{"path": str(write(tmp_path / "held_out.jsonl", 5, completion="No."))}]},
        resources={"devices_per_node": 1, "device": "cpu", "device_mapping": {"training": 0}},
    )
    report = SFTPipeline.check(config)
    assert not report.errors
    assert len(calls) == 2  # the data and the evaluation
    lasting = SFTPipeline.with_steps(config)
    assert lasting.steps == 18  # 120 / 7
    assert len(SFTPipeline.trained_on(lasting)) == 60
    evaluated = SFTPipeline.evaluated_on(lasting)
    assert evaluated is not None
    assert len(evaluated) == 5
    assert len(calls) == 2
