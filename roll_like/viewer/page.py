"""Rollouts of a run as one page for the browser: filters, conversations turn by turn, tokens one by one.

The page stands alone: its data, its style and its script are in it, and it loads nothing. What a policy or an
environment wrote is data to the script, which puts it into the page as text only; a Content-Security-Policy lets no
other script run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from roll_like.errors import ConfigError
from roll_like.metrics import files
from roll_like.metrics.reports.page import render_page
from roll_like.metrics.rollout_text import printable
from roll_like.metrics.rollouts import RolloutRow, group_of, solved, subsample
from roll_like.metrics.runs import read_config
from roll_like.rollout.replay import tokens_stem
from roll_like.rollout.storage import has_groups
from roll_like.rollout.thumbnails import thumbnails_folder
from roll_like.viewer.browse import Rollouts, Wanted, domain_of
from roll_like.viewer.tokens import decoder, step_tokens

#: Rollouts on a page by default.
PAGE_LIMIT = 1000
#: Most bytes of pictures in a page.
PICTURE_BYTES = 32 * 2**20
_THUMBNAIL = re.compile(r"[0-9a-f]{32}\.webp")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutsPage:
    """A page.

    Attributes:
        text: The HTML.
        held: How many rollouts it holds.
        found: How many were wanted.
        notes: What it lacks, and why.
    """

    text: str
    held: int
    found: int
    notes: tuple[str, ...]


def rollouts_page(rollouts: Rollouts, wanted: Wanted, *, limit: int | None = None) -> RolloutsPage:
    """Return a page of the rollouts that are wanted.

    Args:
        rollouts: Of a run.
        wanted: Which of them.
        limit: Most rollouts; 0 is endless, None is `PAGE_LIMIT`. Of more, as many of each group are chosen.

    Raises:
        DataError: A file cannot be read.
        CheckpointError: Saved tokens cannot be read.
    """
    rows = list(rollouts.select(wanted))
    chosen = subsample(rows, (PAGE_LIMIT if limit is None else limit) or None)
    tokens, notes = _tokens_of(rollouts.run_dir, chosen)
    pictures, missing = _pictures(rollouts.run_dir, chosen)
    notes += missing
    records = [_record(row, tokens.get(row["id"])) for row in chosen]
    script = (_TEMPLATES / "rollouts.js").read_text(encoding="utf-8")
    text = render_page(
        "rollouts.html",
        folder=_TEMPLATES,
        title=f"{rollouts.run_dir.name}: rollouts",
        data=htmlsafe_json_dumps(_clean(files.plain(records)), separators=(",", ":")),
        pictures=htmlsafe_json_dumps(pictures, separators=(",", ":")),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        left_out=len(rows) - len(chosen),
        notes=notes,
    )
    return RolloutsPage(text=text, held=len(chosen), found=len(rows), notes=notes)


def _tokens_of(run_dir: Path, rows: Iterable[RolloutRow]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Return the tokens of training rollouts by their ids, where they were saved, and why there are none."""
    steps = {row["step"] for row in rows if row["kind"] == "train" and has_groups(tokens_stem(run_dir, row["step"]))}
    if not steps:
        return {}, ()
    try:
        decode = decoder(read_config(run_dir))
    except ConfigError as error:
        return {}, (f"tokens were saved, and are not on the page, because they cannot be decoded: {error.message}",)
    return {one: found for step in sorted(steps) for one, found in step_tokens(run_dir, step, decode).items()}, ()


def _pictures(run_dir: Path, rows: Iterable[RolloutRow]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the small copies of the rows' images as addresses of data by their files, and why some are left out."""
    names = dict.fromkeys(str(image.get("file")) for row in rows for image in row.get("images") or ())
    found: dict[str, str] = {}
    left = PICTURE_BYTES
    for name in names:
        path = thumbnails_folder(run_dir) / name
        if not _THUMBNAIL.fullmatch(name) or not path.is_file():
            continue
        data = path.read_bytes()
        left -= len(data)
        if left < 0:
            break
        found[name] = f"data:image/webp;base64,{base64.b64encode(data).decode()}"
    lost = len(names) - len(found)
    if not lost:
        return found, ()
    return found, (
        f"{lost} of {len(names)} images are shown by their names: they are not there, or too many for a page",
    )


def _record(row: RolloutRow, tokens: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a rollout as the script takes it: the row, and what its filters and its list need."""
    turns: Sequence[Mapping[str, Any]] = row.get("turns") or ()
    return {
        **row,
        "group": group_of(row["id"]),
        "domain": domain_of(row),
        "solved": solved(row),
        "invalid": sum(bool(turn.get("invalid")) for turn in turns),
        "failed_calls": sum(bool(call.get("error")) for turn in turns for call in turn.get("tool_calls", ())),
        **({} if tokens is None else {"saved": tokens}),
    }


def _clean(value: Any) -> Any:
    """Return JSON without control characters and without those that turn the direction of what follows."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
