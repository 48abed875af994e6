"""Writes the data of `configs/agentic_swe_8gpu.yaml`: issues of repositories, each with its image and its tests.

    python scripts/make_swe_data.py                       # SWE-Gym and SWE-bench Verified from the hub → swe_data/
    python scripts/make_swe_data.py --train rows.parquet --eval verified.parquet --folder swe_data

Rows have the schema of SWE-bench (arXiv:2310.06770): `instance_id`, `base_commit`, `problem_statement`, `patch`,
`test_patch`, `FAIL_TO_PASS` and `PASS_TO_PASS`, as lists or as JSON text. So do those of SWE-Gym (arXiv:2412.21139) and
of SWE-rebench (arXiv:2505.20411), whose rows name their images (`docker_image`). Rows whose tests have no names of
pytest, such as those of Django and SymPy, are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_like.config.data import RowSource
from roll_like.data.rows import Row, read_rows
from roll_like.errors import DataError
from roll_like.metrics.files import replacing

FIELDS = ("instance_id", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
#: Data sets on the hub and their images, of instances that are called `{owner}__{name}`.
HUB = {
    "train": ({"path": "SWE-Gym/SWE-Gym"}, "docker.io/xingyaoww/sweb.eval.x86_64.{owner}_s_{name}:latest"),
    "test": (
        {"path": "princeton-nlp/SWE-bench_Verified"},
        "docker.io/swebench/sweb.eval.x86_64.{owner}_1776_{name}:latest",
    ),
}
PROMPT = """The repository in {workdir} has this issue:

<issue>
{issue}
</issue>

Change the code of the repository so that the issue is resolved. Tests that you cannot see decide whether it is; changes
of the repository's tests are undone."""


def task_of(row: Row, images: str, workdir: str, option: str) -> dict[str, Any] | None:
    """Return a row as `examples/swe/swe_tasks.py` reads it; None if its tests have no names of pytest.

    Raises:
        DataError: It is not of the schema.
    """
    fields = row.fields
    if missing := [name for name in FIELDS if fields.get(name) is None]:
        raise DataError(
            f"{row.origin}: expected the fields {', '.join(FIELDS)}; {', '.join(missing)} is missing",
            fix=f"give {option} a data set of SWE-bench's schema",
        )
    fail_to_pass, pass_to_pass = (names_of(row, name) for name in FIELDS[-2:])
    if not fail_to_pass or any("::" not in name for name in (*fail_to_pass, *pass_to_pass)):
        return None
    owner, _, name = str(fields["instance_id"]).lower().partition("__")
    return {
        "id": fields["instance_id"],
        "image": fields.get("docker_image") or images.format(owner=owner, name=name),
        "workdir": workdir,
        "prompt": PROMPT.format(workdir=workdir, issue=fields["problem_statement"].strip()),
        "base_commit": fields["base_commit"],
        "patch": fields["patch"],
        "test_patch": fields["test_patch"],
        "test_files": sorted(set(re.findall(r"^diff --git a/.* b/(.*)$", fields["test_patch"], re.MULTILINE))),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
    }


def names_of(row: Row, field: str) -> list[str]:
    """Return names of tests, which SWE-bench's own rows hold as JSON text.

    Raises:
        DataError: They are something else.
    """
    found = row.fields[field]
    try:
        names = json.loads(found) if isinstance(found, str) else list(found)
        if all(isinstance(name, str) for name in names):
            return list(names)
    except (ValueError, TypeError):
        pass
    raise DataError(f"{row.origin}: expected names of tests in {field}, found {str(found)[:80]!r}", fix="correct it")


def write(path: Path, source: Mapping[str, Any], images: str, workdir: str, option: str) -> None:
    """Write the tasks of a data set, and print how many there are and what was left out."""
    written, left_out = 0, Counter[str]()
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in read_rows(RowSource.model_validate(source), option):
            task = task_of(row, images, workdir, option)
            if task is None:
                left_out[str(row.fields.get("repo", "?"))] += 1
                continue
            file.write(json.dumps(task, ensure_ascii=False) + "\n")
            written += 1
    print(f"{path}: {written} issues")
    if left_out:
        of = ", ".join(f"{repo} {count}" for repo, count in left_out.most_common())
        print(f"  left out, because their tests have no names of pytest: {left_out.total()} ({of})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write `train.jsonl` and `eval.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="file of training rows; default: SWE-Gym on the hub")
    parser.add_argument("--eval", help="file of rows for evaluation; default: SWE-bench Verified on the hub")
    parser.add_argument("--folder", type=Path, default=Path("swe_data"))
    parser.add_argument("--train-images", default=HUB["train"][1], help="images of rows that name none")
    parser.add_argument("--eval-images", default=HUB["test"][1], help="the same of the evaluation's rows")
    parser.add_argument("--workdir", default="/testbed", help="where images have the repository (default: /testbed)")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, split, path, images in (
        ("train", "train", given.train, given.train_images),
        ("eval", "test", given.eval, given.eval_images),
    ):
        source = {"path": path} if path else {**HUB[split][0], "split": split}
        write(given.folder / f"{name}.jsonl", source, images, given.workdir, f"--{name}")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
