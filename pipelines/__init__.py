"""Pipelines: one folder for each.

A new one is a folder with two files, and a line in `pyproject.toml` (entry points of `roll_like.pipelines`):

    config.py     the configuration class, registered with `PIPELINES.register("name")`; `implementation` names the next
    pipeline.py   a class that derives from `PolicyGradientPipeline`, `OfflinePipeline`, `TrainerPipeline` or `Pipeline`

`rlvr` (samples groups) and `sft` (given data) are the smallest; docs/contributing.md, "Adding a plugin", lists what to
write for each base class.
"""
