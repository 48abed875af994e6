"""A worker extension without the repacking of the output head: what a sync check has to notice."""

from __future__ import annotations

from roll_like.inference import vllm_worker

vllm_worker.repack_head = lambda model: None

WorkerExtension = vllm_worker.WorkerExtension
