"""`roll-like rollouts RUN -o PAGE.html`: the data and the policy of the page, and what its script does in a browser."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import dom, found_by, needs_chromium
from PIL import Image
from run_folders import Page, data_of
from test_viewer_browse import CALL, keep, run_dir  # noqa: F401  (a fixture)
from test_viewer_tokens import a_step, decode, values_of
from tests_support import scored, task

from roll_like import cli
from roll_like.errors import ConfigError
from roll_like.rollout.metrics import rollout_rows
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import write_groups
from roll_like.rollout.thumbnails import keep_thumbnails, thumbnail_name, thumbnails_folder
from roll_like.types import Group, Picture, PlacedImage, Scored

HOSTILE = (
    "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
    "<!-- <script> \u2028 \x1b[31m \u202e {{ 7 * 7 }} \ud83d"
)

#: A picture of one pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAX+XDSwAAAABJRU5ErkJggg=="


@pytest.fixture(autouse=True)
def _decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_like.viewer.page.decoder", lambda _: decode)


@pytest.fixture
def write(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:  # noqa: F811
    """Write the page of a run and return it; what was printed is in `write.out` and `write.err`."""

    def page(*arguments: str) -> str:
        path = tmp_path / "page.html"
        assert cli.main(["rollouts", str(run_dir), "-o", str(path), *arguments]) == 0
        page.out, page.err = capsys.readouterr()  # type: ignore[attr-defined]
        return path.read_text(encoding="utf-8")

    return page


def with_tokens(run_dir: Path, step: int = 20, *, values: bool = True) -> None:  # noqa: F811
    """Add a step with saved tokens, the third of its four samples left out of the update."""
    groups = a_step()
    keep(run_dir, step, rollout_rows(groups, 5))
    trained = [True, True, False, True]
    write_groups(tokens_stem(run_dir, step), groups, values_of(groups, trained) if values else None)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"pipeline": "rlvr", "model": {"path": "org/tiny"}}))


def records(page: str) -> dict[str, Any]:
    """The rollouts of a page by id."""
    return {row["id"]: row for row in data_of(page)["rollouts"]}


def test_a_page_holds_every_rollout_and_what_it_is_found_by(write: Callable[..., str]) -> None:
    found = records(write())
    assert list(found)[:4] == ["eval0/0.0", "eval0/0.1", "1/0.0", "1/0.1"]
    assert len(found) == 10
    called = found["12/1.0"]
    assert (called["group"], called["domain"], called["solved"]) == ("12/1", "tools", False)
    assert (called["invalid"], called["failed_calls"]) == (1, 1)
    assert called["turns"][1]["tool_calls"][0] == CALL
    assert "saved" not in called
    assert "10 rollouts)" in write.out  # type: ignore[attr-defined]


def test_filters_and_a_limit_choose_what_a_page_holds(write: Callable[..., str]) -> None:
    assert list(records(write("--step", "12", "--success"))) == ["12/0.0", "12/1.1"]
    page = write("--kind", "train", "--limit", "4")
    assert list(records(page)) == ["1/0.0", "1/1.0", "12/0.0", "12/1.0"]  # one of each group
    assert "4 more rollouts were left out" in Page(page).text
    assert "4 rollouts of 8; --limit N holds more" in write.out  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "page.txt"], "expected a file that ends in .html"),
        (["-o", "page.html", "--json"], "leave out -o: roll-like rollouts RUN --json"),
        (["-o", "page.html", "--step", "99"], "no rollout of these steps; there are: train 1 to 12, evaluate 0 to 0"),
        (["-o", "page.html", "--reward", "7:"], "none of 10 rollouts is like that"),
        (["-o", "page.html", "--limit", "-1"], "write --limit 0 for all"),
        (["-o", "run.json/page.html"], "run.json"),
    ],
)
def test_what_gives_no_page_is_said(
    run_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(run_dir)
    assert cli.main(["rollouts", str(run_dir), *arguments]) != 0
    assert said in capsys.readouterr().err
    assert not list(run_dir.glob("page*"))


def test_saved_tokens_are_beside_their_rollouts(write: Callable[..., str], run_dir: Path) -> None:  # noqa: F811
    with_tokens(run_dir)
    found = records(write("--step", "12:"))
    assert "saved" not in found["12/0.0"]
    assert found["20/0.1"]["saved"]["parts"] == [2]
    assert found["20/0.3"]["saved"]["trained"] is False
    assert found["20/1.0"]["saved"]["pieces"][1]["trainer"] == [-1.125] * 3
    assert [row["staleness"] for row in found.values() if row["step"] == 20] == [5, 2, 5, 5]


def test_without_the_tokenizer_the_page_says_what_it_lacks(
    write: Callable[..., str],
    run_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_tokens(run_dir)

    def absent(_: object) -> None:
        raise ConfigError("there is no model org/tiny")

    monkeypatch.setattr("roll_like.viewer.page.decoder", absent)
    page = write()
    assert not any("saved" in row for row in records(page).values())
    assert "they cannot be decoded: there is no model org/tiny" in Page(page).text
    assert "warning: tokens were saved" in write.err  # type: ignore[attr-defined]


def hostile(run_dir: Path) -> None:  # noqa: F811
    """Replace every text of the last step."""
    owner = replace(task(0), messages=({"role": HOSTILE, "content": HOSTILE},), answer=HOSTILE)
    sample: Scored = scored(owner, 0.5)
    sample = replace(sample, trajectory=replace(sample.trajectory, text=HOSTILE), rewards={HOSTILE: 1.0})
    rows = rollout_rows([Group(task=owner, samples=(sample,), failures=())])
    call = {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}, "result": HOSTILE, "error": True}
    picture = {"type": "image_url", "image_url": {"url": f"javascript:{HOSTILE}"}}
    shown = [{"role": "user", "content": [picture, {"type": "text", "text": HOSTILE}]}]
    turn = {"shown": shown, "text": HOSTILE, "tokens": 1, "prompt_tokens": 1, "reward": 0.0, "tool_calls": [call]}
    episode = {**rows[0], "turns": [turn], "task_id": HOSTILE, "domain": HOSTILE}
    keep(run_dir, 12, [*rows, episode])


def test_hostile_text_is_data_and_one_script_may_run(write: Callable[..., str], run_dir: Path) -> None:  # noqa: F811
    hostile(run_dir)
    text = records(write("--step", "12"))["12/0.0"]["text"]
    assert text.startswith("</script><script>document.title")
    assert not set(text) & set("\u2028\x1b\u202e\ud83d")


# ---- in a browser ---------------------------------------------------------------------------------


@needs_chromium
def test_hostile_text_does_not_run(write: Callable[..., str], run_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    hostile(run_dir)
    page = write("--step", "12")
    shown = found_by(
        """
        document.querySelectorAll("#list tbody tr")[1].click();
        return [document.title, document.querySelectorAll("script, img, iframe").length,
          document.getElementById("detail").textContent.includes("script><script>document.title")];
        """,
        page,
        tmp_path,
    )
    assert shown == ["demo: rollouts", 3, True]  # data, script and the test's own
    # a script or a handler that came into the page by a mistake would not run
    path = tmp_path / "attacked.html"
    path.write_text(page.replace("<h1>", f"{HOSTILE.partition('<!--')[0]}<h1>"), encoding="utf-8")
    after = dom(path, tmp_path)
    assert "onerror" in after
    assert "<title>demo: rollouts</title>" in after


@needs_chromium
def test_the_list_is_filtered_and_sorted(write: Callable[..., str], run_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    with_tokens(run_dir)
    filters = {
        "all": {},
        "reward": {"reward-from": "-1", "reward-to": "0.25"},
        "solved": {"solved": "yes", "step-from": "12"},
        "domain": {"domain": "tools", "kind": "train", "step-to": "1"},
        "length": {"length-from": "8"},
        "staleness": {"staleness-to": "2"},
        "calls": {"special": "a failed tool call"},
        "cut": {"special": "no part in the update"},
        "text": {"search": "RIGHT AT 12"},
        "order": {"order": "lowest reward", "kind": "train", "step-to": "12"},
        "none": {"search": "never said"},
    }
    found = found_by(
        f"const filters = {json.dumps(filters)};"
        """
        const form = document.getElementById("filters"), shown = {};
        for (const [name, settings] of Object.entries(filters)) {
          form.reset();
          await new Promise((done) => setTimeout(done, 1));
          for (const [id, value] of Object.entries(settings)) document.getElementById(id).value = value;
          form.dispatchEvent(new Event("input"));
          shown[name] = [...document.querySelectorAll("#list tbody td:first-child")].map((one) => one.textContent);
        }
        shown.detail = document.getElementById("detail").textContent;
        shown.count = document.getElementById("count").textContent;
        return shown;
        """,
        write(),
        tmp_path,
    )
    assert len(found["all"]) == 14
    assert found["reward"] == ["1/0.1", "1/1.0", "12/0.1", "12/1.0", "20/0.1", "20/1.0"]
    assert found["solved"] == ["12/0.0", "12/1.1", "20/0.0"]
    assert found["domain"] == ["1/1.0", "1/1.1"]
    assert found["length"] == ["1/0.1", "12/0.1"]
    assert found["staleness"] == ["20/0.1"]
    assert found["calls"] == ["1/1.0", "12/1.0"]
    assert found["cut"] == ["20/0.3"]
    assert found["text"] == ["12/0.0"]
    assert found["order"] == ["1/0.1", "12/0.1", "1/1.0", "12/1.0", "1/0.0", "1/1.1", "12/0.0", "12/1.1"]
    assert (found["none"], found["detail"]) == ([], "No rollout is like that.")
    assert found["count"].startswith("0 of 14 rollouts.")


@needs_chromium
def test_an_episode_is_read_turn_by_turn_with_calls_and_pictures(
    write: Callable[..., str],
    run_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    picture = f"data:image/png;base64,{PIXEL}"
    path = run_dir / "rollouts" / "step_000012.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parts = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": picture}}]
    rows[2]["turns"][1]["shown"][0]["content"] = parts
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = found_by(
        """
        const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
        press("j"); press("j"); press("j"); press("k");
        const image = document.querySelector("#detail img");
        await image.decode();
        return {
          id: document.querySelector("#detail h2").textContent, hash: location.hash,
          current: document.querySelector("tr[aria-current=true]").id,
          blocks: [...document.querySelectorAll("#detail .block > b:first-child")].map((one) => one.textContent),
          call: document.querySelector("#detail .tool").textContent, width: image.naturalWidth,
          group: [...document.querySelectorAll("#detail .row button[title*='/']")].map(
            (one) => one.textContent),
        };
        """,
        write("--step", "12"),
        tmp_path,
    )
    assert (found["id"], found["hash"], found["current"]) == ("12/1.0", "#12/1.0", "row-12/1.0")
    assert found["blocks"] == [
        *("system", "user", "policy"),
        *("user", "policy", "tool call", "tool call, failed", "the environment found no action in this turn", "user"),
    ]
    assert found["call"] == 'tool callcalculator {"expression":"1+1"}result2'
    assert found["width"] == 1
    assert found["group"] == ["0.25", "1"]


def with_images(run_dir: Path) -> list[str]:  # noqa: F811
    """Give the first rollouts prompts with three images, the second of which has no small copy; return their files."""
    pictures = [Picture(data=png(colour), label=f"{colour}.png") for colour in ("red", "lime", "blue")]
    images = tuple(PlacedImage(picture=one, start=at, length=1) for at, one in enumerate(pictures))
    path = run_dir / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    shown = "[image: red.png] is red, [image: lime.png]?[image: blue.png]"
    sample = scored(task(), 1.0)
    sample = replace(sample, trajectory=replace(sample.trajectory, images=images))
    keep_thumbnails(run_dir, [Group(task=task(), samples=(sample,), failures=())])
    files = [thumbnail_name(one) for one in pictures]
    (thumbnails_folder(run_dir) / files[1]).unlink()
    for row in rows:
        row.pop("turns", None)
        row["messages"] = [{"role": "user", "content": shown}]
        row["images"] = [{"label": one.label, "file": file} for one, file in zip(pictures, files, strict=True)]
        row["images"].append({"label": "x", "file": "../../config.yaml"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (600, 300), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def test_images_of_prompts_are_on_the_page_once(write: Callable[..., str], run_dir: Path) -> None:  # noqa: F811
    files = with_images(run_dir)
    page = write("--step", "1")
    pictures = data_of(page)["pictures"]
    assert list(pictures) == [files[0], files[2]]
    small = Image.open(io.BytesIO(base64.b64decode(pictures[files[0]].partition(",")[2])))
    assert small.size == (256, 128)
    assert "2 of 4 images are shown by their names" in page


@needs_chromium
def test_images_of_prompts_are_seen(write: Callable[..., str], run_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    with_images(run_dir)
    found = found_by(
        """
        const images = [...document.querySelectorAll("#detail .block img")];
        await Promise.all(images.map((one) => one.decode()));
        return {
          texts: [...document.querySelectorAll("#detail .block")][0].textContent,
          widths: images.map((one) => one.naturalWidth),
        };
        """,
        write("--step", "1"),
        tmp_path,
    )
    assert found == {"texts": "user is red, [image: lime.png]?", "widths": [256, 256]}


@needs_chromium
def test_tokens_are_read_one_by_one(write: Callable[..., str], run_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    with_tokens(run_dir)
    found = found_by(
        """
        const read = async (id) => {
          location.hash = id;
          await new Promise((done) => setTimeout(done, 20));
          if (!document.getElementById("tokens")) {
            [...document.querySelectorAll("#detail button")].find((one) => one.textContent === "tokens").click();
          }
          const tokens = [...document.querySelectorAll("#tokens .token")];
          tokens[0].focus();
          const press = () => document.activeElement.dispatchEvent(
            new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
          for (let at = 1; at < tokens.length; at += 1) press();
          return {
            texts: tokens.map((one) => one.textContent), whole: document.getElementById("tokens").textContent,
            tip: Object.fromEntries([...document.querySelectorAll("#tip dt")].map(
              (one) => [one.textContent, one.nextSibling.textContent])),
            colours: tokens.map((one) => one.style.backgroundColor),
            legend: document.querySelector(".scale").parentElement.textContent,
            modes: [...document.querySelectorAll("[aria-label=colour] button")].map((one) => one.textContent),
          };
        };
        const first = await read("20/0.1"), masked = await read("20/0.3");
        location.hash = "20/0.1";
        await new Promise((done) => setTimeout(done, 20));
        const press = (name) => {
          [...document.querySelectorAll("[aria-label=colour] button")].find((one) => one.textContent === name).click();
          return [...document.querySelectorAll("#tokens .token")].map((one) => one.style.backgroundColor);
        };
        return { first, masked, advantage: press("advantage"), version: press("policy version") };
        """,
        write("--step", "20"),
        tmp_path,
    )
    first, masked = found["first"], found["masked"]
    assert first["texts"] == ["<12>", "<13>", "<17>"]
    assert first["whole"] == "<10><11><12><13>history was rewritten: the next sequence<14><15><16><17><18>"
    assert first["tip"] == {
        "token": "3 of 3, turn 2",
        "text": '"<17>"',
        "policy version": "4",
        "engine": "−0.875 nats, p 0.417",
        "trainer": "−1 nats",
        "trainer − engine": "−0.125 nats",
        "advantage": "3",
    }
    assert first["legend"].startswith("−0.1250.125nats")
    assert first["colours"] == ["rgba(var(--low), 0.650)"] * 3  # all differ by the most that is on the page
    assert "advantage" not in masked["tip"]
    assert masked["tip"]["trainer − engine"] == "−0.125 nats"
    assert "advantage" in first["modes"]
    assert "advantage" not in masked["modes"]
    strengths = [0.65 * number / 4 for number in (2, 2, 3)]  # of the largest advantage
    assert found["advantage"] == [f"rgba(var(--high), {one:.3f})" for one in strengths]
    # versions 0 to 4 are on the page: the oldest is the darkest
    assert found["version"] == [f"rgba(var(--high), {one:.3f})" for one in (0.65 / 4, 0.65 / 4, 0.0)]


@needs_chromium
def test_tokens_without_the_trainers_numbers_say_how_to_get_them(
    write: Callable[..., str],
    run_dir: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    with_tokens(run_dir, values=False)
    found = found_by(
        """
        document.dispatchEvent(new KeyboardEvent("keydown", { key: "t" }));
        return [[...document.querySelectorAll("[aria-label=colour] button")].map((one) => one.textContent),
          document.getElementById("detail").textContent.includes("With rollout.save_logprobs: true")];
        """,
        write("--step", "20"),
        tmp_path,
    )
    assert found == [["log-probability", "policy version"], True]


@needs_chromium
def test_two_are_read_beside_each_other_with_what_differs_marked(
    run_dir: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["rollouts", str(run_dir), "--diff", "1/0.0", "1/0.1"]) == 0
    path = run_dir / "diff.html"
    assert capsys.readouterr().out.startswith(f"written: {path} (")
    found = found_by(
        """
        const sides = [...document.querySelectorAll("#detail .pair > div")];
        const of = (query) => sides.map((side) => [...side.querySelectorAll(query)].map((one) => one.textContent));
        const seen = { heads: of("h2"), marks: of("mark"), only: of("h3.only, .block.only") };
        const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
        press("p");
        seen.alone = document.querySelectorAll("#detail .pair").length;
        press("k"); press("p"); press("j");
        seen.again = [...document.querySelectorAll("#detail .pair h2")].map((one) => one.textContent);
        return seen;
        """,
        path.read_text(encoding="utf-8"),
        tmp_path,
    )
    assert found["heads"] == [["1/0.0"], ["1/0.1"]]
    assert found["marks"] == [["left", "right at 1"], ["up", "up"]]
    assert found["only"] == [[], ["turn 3", "userYou are at 2.\nSF\nFG", "policydown"]]
    assert (found["alone"], found["again"]) == (0, ["1/0.0", "1/0.1"])
