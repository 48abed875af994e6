"""Models of the hub: checked as local ones are where they are in the cache, and named where they are not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub.constants import is_offline_mode

from roll_like.check.findings import Finding, failed, is_repo_id
from roll_like.config.model import ModelConfig
from roll_like.config.run import RunConfig
from roll_like.errors import RollLikeError
from roll_like.models.load import MODEL, TOKENIZER, cached_copy, resolve_model
from roll_like.models.modules import load_model_config
from roll_like.models.of_run import JUDGE, models_of


def all_here(config: RunConfig) -> bool:
    """Return whether a run has nothing to download; models that rewards load are theirs to download."""
    sections = [(each.section, each.key) for each in models_of(config) if not each.loads_itself]
    if config.model.tokenizer is not None:
        sections.append((ModelConfig(path=config.model.tokenizer), TOKENIZER))
    return all(cached_copy(section, key).complete for section, key in sections if is_repo_id(section.path))


def check_judge(config: RunConfig) -> Iterator[Finding]:
    """Yield whether the models that score are there: the run's judge, and those that rewards load."""
    for each in models_of(config):
        if each.key != JUDGE and not each.loads_itself:
            continue  # those that trainers load are checked where their sizes count
        findings: list[Finding] = []
        model = localised(each.section, each.key, findings)
        yield from findings
        if model is None:
            continue
        try:
            if each.loads_itself:
                load_model_config(Path(os.path.expanduser(model.path)), trust_remote_code=True)
            else:
                resolve_model(model, key=each.key)
        except RollLikeError as error:
            yield failed(each.key, error)


def localised(config: ModelConfig, key: str, findings: list[Finding]) -> ModelConfig | None:
    """Return the model section with a hub id replaced by its cached copy, None where that needs network."""
    if not is_repo_id(config.path):
        return config
    found = cached_copy(config, key)
    if found.complete:
        return config.model_copy(update={"path": str(found.path)})
    if found.path is None:
        where = "it is not a local path and not in the Hugging Face cache, so it needs network"
    else:
        missing = ", ".join(found.missing[:3]) + (", …" if len(found.missing) > 3 else "")
        where = f"the Hugging Face cache holds a part of it, without {missing}, so it needs network"
    when = "it is downloaded when the run starts"
    if is_offline_mode():
        when = (
            "HF_HUB_OFFLINE is set, so a run on this machine cannot download it: unset it, or fetch it elsewhere "
            f"(`hf download {config.path} --local-dir DIR`) and set {key} to that directory"
        )
    plan = ""
    if key == MODEL and (found.path is None or not (found.path / "config.json").is_file()):
        plan = (
            f"; so there is no plan of memory either: config.json alone is enough for one "
            f"(`hf download {config.path} config.json`)"
        )
    findings.append(Finding.warning(key, f"{config.path} is not checked: {where}; {when}{plan}"))
    return None
