"""Write the JSON Schemas and reference pages of the configuration classes.

python scripts/make_config_docs.py           write them
python scripts/make_config_docs.py --check   fail when a committed file is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from config_tables import markdown

from roll_like.builtin.pipelines.agentic.config import AgenticConfig
from roll_like.builtin.pipelines.distill.config import DistillConfig
from roll_like.builtin.pipelines.dpo.config import DPOConfig
from roll_like.builtin.pipelines.on_policy_distill.config import OnPolicyDistillConfig
from roll_like.builtin.pipelines.online_dpo.config import OnlineDPOConfig
from roll_like.builtin.pipelines.reward_model.config import RewardModelRunConfig
from roll_like.builtin.pipelines.rlvr.config import RLVRConfig
from roll_like.builtin.pipelines.sft.config import SFTConfig
from roll_like.config.run import RunConfig
from roll_like.config.schema import json_schema, write_json
from roll_like.service.config import ServiceConfig

ROOT = Path(__file__).resolve().parent.parent

INTRODUCTION = """\
# Configuration

Every key of a `pipeline: rlvr` file, generated from the configuration classes by `scripts/make_config_docs.py`.
The same as JSON Schema: [schema/rlvr.json](schema/rlvr.json). Editors with a YAML language server complete and check
keys in files whose first line is

```yaml
# yaml-language-server: $schema=../docs/schema/rlvr.json
```

- Check a file without starting anything: `roll-like run --config FILE --check`.
- Change keys on the command line: `roll-like run --config FILE steps=5 data.sources.0.weight=2 reference={}`. Values
  are YAML; items of lists are numbered from 0; setting another `type` drops the settings of the former type.
- Start from another file: `extends: other.yaml`, relative to the file that says so. Sections are merged key by key,
  lists are replaced.
- Refer to another key: `${rollout.samples_per_prompt}`; to an environment variable: `${oc.env:NAME}`. A plain `${` is
  written `\\${`. Where a file that extends another, or an override, replaces what was referred to, a key that
  the section no longer has is the default for a key of the same name; else the reference means what it meant before.
- Relative paths of data and models are relative to the working directory; messages name them whole too.
- Batch sizes are in samples: `prompts_per_step × samples_per_prompt` samples a step, in `updates_per_step` optimizer
  steps of equal size. Micro-batches follow from token budgets.
- A device range such as `0-3` names devices, counted through all nodes. Equal ranges are colocated (the roles take
  turns), disjoint ranges are disaggregated (they run side by side); ranges that overlap only in part are refused. A
  range is divided evenly among the role's workers.
- A plugin (reward, advantage, loss, tracker) is written `{type: name, …}`, or only `name` for its defaults.
"""


SERVICE = """\
# Configuration of a service

Every key of a file for `roll-like service`, generated as [configuration.md](configuration.md) is, which also says how
files extend each other, how keys are changed on the command line, and what a device range is. JSON Schema:
[schema/service.json](schema/service.json). What is served: [service.md](service.md).
"""


@dataclass(frozen=True, slots=True)
class Page:
    """A page that says what differs from `configuration.md`.

    Attributes:
        config: The configuration class.
        runs: What its runs are called.
        more: What else to read: a sentence with a link.
    """

    config: type[RunConfig]
    runs: str
    more: str

    @property
    def pipeline(self) -> str:
        """Name of the pipeline, and of the files."""
        return str(self.config.model_fields["pipeline"].default)

    @property
    def introduction(self) -> str:
        """How the page begins."""
        return f"""\
# Configuration of {self.runs}

Every key of a `pipeline: {self.pipeline}` file, generated as [configuration.md](configuration.md) is, which also
says how files extend each other, how keys are changed on the command line, and what a device range is. JSON Schema:
[schema/{self.pipeline}.json](schema/{self.pipeline}.json). {self.more}
"""


PAGES = (
    Page(AgenticConfig, "agentic runs", "What environments and episodes are: [environments.md](environments.md)."),
    Page(SFTConfig, "supervised runs", "What becomes of rows: [supervised.md](supervised.md)."),
    Page(DPOConfig, "preference runs", "What is learned from pairs: [preferences.md](preferences.md)."),
    Page(OnlineDPOConfig, "online DPO runs", "How answers become pairs: [preferences.md](preferences.md)."),
    Page(
        RewardModelRunConfig,
        "runs that train a reward model",
        "What is learned from pairs: [reward_models.md](reward_models.md).",
    ),
    Page(DistillConfig, "distillation runs", "What students and teachers do: [distillation.md](distillation.md)."),
    Page(
        OnPolicyDistillConfig,
        "on-policy distillation runs",
        "What students and teachers do: [distillation.md](distillation.md).",
    ),
)


def files() -> dict[Path, str]:
    """Return each generated file's text."""
    docs, rlvr = ROOT / "docs", json_schema(RLVRConfig)
    written = {
        docs / "schema/rlvr.json": write_json(rlvr),
        docs / "configuration.md": _page(INTRODUCTION, markdown(rlvr)),
    }
    for page in PAGES:
        schema = json_schema(page.config)
        written[docs / f"schema/{page.pipeline}.json"] = write_json(schema)
        lines = markdown(schema, rlvr, "configuration.md")
        written[docs / f"configuration_{page.pipeline}.md"] = _page(page.introduction, lines)
    service = json_schema(ServiceConfig)
    written[docs / "schema/service.json"] = write_json(service)
    written[docs / "configuration_service.md"] = _page(SERVICE, markdown(service, rlvr, "configuration.md"))
    return written


def _page(introduction: str, lines: Iterable[str]) -> str:
    return "\n".join([introduction, *lines]).rstrip("\n") + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare, exit code 1 when a file differs")
    arguments = parser.parse_args(argv)
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is not up to date' if arguments.check else 'written'}")
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], encoding="utf-8")
    if stale and arguments.check:
        print("fix: python scripts/make_config_docs.py", file=sys.stderr)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
