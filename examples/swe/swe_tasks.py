"""Issues of repositories as tasks of verifiers, out of what `scripts/make_swe_data.py` writes.

A run plays them with `environments: [{verifiers: {taskset: {id: swe-tasks, path: swe_data/train.jsonl}, …}}]`. The
file is imported where verifiers is installed, so it cannot use roll_like.

An agent works in the container of its issue. What it changed in the repository is kept as a patch. As in SWE-bench
(arXiv:2310.06770), the issue is resolved if all tests pass that the row names, after the tests of the row have taken
the place of the agent's.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

import verifiers.v1 as vf

#: Where the hidden tests are while they are needed, and what the agent changed.
TESTS, CHANGES = "/tmp/swe-tests.patch", "/logs/artifacts/swe-changes.patch"
#: More is no answer to an issue. Bytes.
MOST_CHANGED = 8 * 2**20

#: Prints the state of the repository's tracked files, committed or not, as a commit.
START = "git -c user.name=start -c user.email=start@localhost stash create; git rev-parse HEAD"
#: $1 is the row's commit. Commits that are not behind the image's are removed, because they show how the issue was
#: resolved; untracked files of the image are none of the agent's.
PREPARE = f"""
git cat-file -e "$1^{{commit}}" && git apply --check {TESTS} && python -m pytest --version > /dev/null || exit 1
rm -f {TESTS}
git remote | xargs -r -n 1 git remote remove
git for-each-ref --format='%(refname)' --no-merged HEAD | xargs -r -n 1 git update-ref -d
rm -f .git/FETCH_HEAD .git/ORIG_HEAD
git reflog expire --expire=now --all && git gc --quiet --prune=now || exit 1
git ls-files --others --exclude-standard | sed 's|^|/|' >> .git/info/exclude
{START}
"""
#: $1 is what the agent started from. A repository that the agent broke gives no changes.
KEEP = f"""
mkdir -p "$(dirname {CHANGES})"
git add --all && git diff --cached --binary "$1" > {CHANGES} || : > {CHANGES}
[ "$(wc -c < {CHANGES})" -le {MOST_CHANGED} ] || : > {CHANGES}
"""
#: $1 is what the agent started from, $2 seconds, then files of the hidden tests, `--`, and files that pytest runs.
#: Changes are applied in a container that does not have them.
GRADE = f"""
start=$1 seconds=$2
shift 2
if [ -s {CHANGES} ] && ! git apply --reverse --check {CHANGES} 2> /dev/null; then
  git apply --whitespace=nowarn {CHANGES} || exit 90
fi
while [ "$1" != -- ]; do
  rm -rf -- "$1"
  git checkout --quiet "$start" -- "$1" 2> /dev/null
  shift
done
shift
git apply --whitespace=nowarn {TESTS} || exit 91
exec timeout --kill-after=10 "$seconds" python -m pytest -rA --tb=no --color=no -p no:cacheprovider "$@"
"""


class SWETaskConfig(vf.TaskConfig):
    """How tests are run."""

    python_folder: str = "/opt/miniconda3/envs/testbed/bin"
    """Where images have the repository's Python; those of SWE-bench, SWE-Gym and SWE-rebench have it here."""
    test_seconds: int = 1800
    """Longest time of all tests; an issue whose tests take longer is not resolved."""


class SWEData(vf.TaskData):
    """One issue, without what the agent must not see."""


class SWETask(vf.Task[SWEData, vf.State, SWETaskConfig]):
    """How an agent's work on one issue is prepared and graded.

    Attributes:
        row: The row that it is made from.
    """

    NEEDS_CONTAINER: ClassVar[bool] = True
    row: dict[str, Any]

    @classmethod
    def of(cls, row: dict[str, Any], config: SWETaskConfig) -> Self:
        """Return the task of a row."""
        name, place = row["id"], {"image": row["image"], "workdir": row["workdir"]}
        task = cls(SWEData(id=name, name=name, prompt=row["prompt"], **place), config)
        task.row = row
        return task

    def runtime_env(self) -> dict[str, str]:
        """Return variables with which `python` and `pytest` are the repository's."""
        system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": f"{self.config.python_folder}:{system}"}

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Remove what came after the issue; an image that the row does not fit is an error."""
        await runtime.write(TESTS, self.row["test_patch"].encode())
        done = await run(runtime, PREPARE, self.row["base_commit"])
        if done.exit_code:
            raise vf.TaskError(f"{self.data.image} is not the repository of {self.data.id}: {said(done)}")
        trace.info["swe_start"] = done.stdout.split()[0]

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Keep what the agent changed."""
        await run(runtime, KEEP, trace.info["swe_start"])

    @vf.reward
    async def resolved(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """Return 1 if all tests pass that the row names, else 0."""
        passed = await self.passed(runtime, trace.info["swe_start"])
        wanted = self.row["fail_to_pass"]
        trace.record_metric("mended_tests", sum(test in passed for test in wanted) / len(wanted))
        return float(passed.issuperset(wanted) and passed.issuperset(self.row["pass_to_pass"]))

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Return whether the row's own patch resolves the issue: `vf-validate` asks."""
        await runtime.write(CHANGES, self.row["patch"].encode())
        passed = await self.passed(runtime, (await run(runtime, START)).stdout.split()[0])
        return passed.issuperset(self.row["fail_to_pass"]) and passed.issuperset(self.row["pass_to_pass"])

    async def passed(self, runtime: vf.Runtime, start: str) -> set[str]:
        """Return the tests that pass with the agent's changes.

        Raises:
            TaskError: They could not be run.
        """
        await runtime.prepare_execution(None)  # the agent may have had no network; tests have it
        await runtime.write(TESTS, self.row["test_patch"].encode())
        tests = [*self.row["fail_to_pass"], *self.row["pass_to_pass"]]
        files = sorted({test.partition("::")[0] for test in tests})
        seconds = str(self.config.test_seconds)
        done = await run(runtime, GRADE, start, seconds, *self.row["test_files"], "--", *files)
        if done.exit_code == 90 or not await runtime.alive():
            raise vf.TaskError(f"the tests of {self.data.id} cannot be run: {said(done)}")
        return passed_tests(done.stdout)


async def run(runtime: vf.Runtime, script: str, *arguments: str) -> Any:
    """Run a script of this file in the repository."""
    return await runtime.run(["sh", "-c", script, "sh", *arguments], {})


def said(done: Any) -> str:
    """Return the end of what a program printed."""
    return f"exit code {done.exit_code}: {(done.stderr or done.stdout).strip()[-500:]}"


def passed_tests(output: str) -> set[str]:
    """Return the tests that passed, or failed as expected, by pytest's short summary.

    SWE-bench's rows have names up to their first blank, which several tests may share: all of these have to pass.

    >>> passed_tests("= short test summary info =\\nPASSED a.py::f[1 + 1]\\nFAILED a.py::f[1 - 1] - it is 0")
    {'a.py::f[1 + 1]'}
    """
    _, _, summary = output.rpartition(" short test summary info ")
    found: dict[str, bool] = {}
    for line in summary.splitlines():
        outcome, _, name = line.partition(" ")
        if outcome not in ("PASSED", "XFAIL", "XPASS", "FAILED", "ERROR") or not name.strip():
            continue
        if outcome != "PASSED":  # the reason stands behind the name
            name = name.partition(" - ")[0]
        for each in {name, name.split()[0]}:
            found[each] = found.get(each, True) and outcome in ("PASSED", "XFAIL")
    return {name for name, passed in found.items() if passed}


class SWEConfig(vf.TasksetConfig):
    """What the run's YAML file may say in `taskset`."""

    path: Path = Path("swe_data/train.jsonl")
    """File that `scripts/make_swe_data.py` has written."""
    task: SWETaskConfig = SWETaskConfig()


class SWETaskset(vf.Taskset[SWETask, SWEConfig]):
    """The issues of a file, in its order."""

    def load(self) -> list[SWETask]:
        """Return the tasks."""
        with self.config.path.open(encoding="utf-8") as lines:
            return [SWETask.of(json.loads(line), self.config.task) for line in lines]


__all__ = ["SWETaskset"]
