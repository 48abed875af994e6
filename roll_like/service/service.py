"""Starts trainer and engines, serves until it is stopped, and leaves nothing running."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from roll_like.check import Finding, Report, check_run, refuse_errors
from roll_like.check.machine import check_engine
from roll_like.check.model import check_engines, check_window
from roll_like.check.plan import Plan, plan
from roll_like.cluster import ResourceManager, metrics_addresses
from roll_like.cluster.driver_loop import DriverLoop
from roll_like.data.chat import Renderer
from roll_like.errors import ConfigError
from roll_like.inference.interface import InferenceEngine
from roll_like.metrics.commands import listening_error
from roll_like.models.load import fetch_config, resolve_model
from roll_like.models.modules import load_model_config
from roll_like.models.of_run import download_models
from roll_like.models.precision import settled
from roll_like.models.shape import ModelShape
from roll_like.policy_gradient.start import start_inference, start_weight_sync
from roll_like.run.folder import locked
from roll_like.run.launch import measuring
from roll_like.run.signals import StopRequested, StopSignal
from roll_like.service.config import ServiceConfig, ServiceRunConfig
from roll_like.service.core import ServiceCore
from roll_like.service.delivery import WeightDelivery
from roll_like.service.objective import RequestObjective
from roll_like.service.rank import ModelsRank
from roll_like.service.sampler import SnapshotSampler
from roll_like.service.server import ServiceServer
from roll_like.service.status import StatusWriter
from roll_like.service.trainer import ModelsTrainer
from roll_like.training.start import rank_spec, start_engine

#: Keys of clients begin with this, as they want it.
KEY_PREFIX = "tml-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan(Plan):
    """What a service takes."""

    models: int = 1
    rank: int | None = None
    loaded: int = 1
    adapters: int = 0

    def _figures(self) -> Table:
        table = Table(title=f"Plan of {self.name}", show_header=False, title_justify="left", title_style="bold")
        trained = (
            "one whole model" if self.rank is None else f"up to {self.models} adapters of rank {self.rank} or less"
        )
        table.add_row("trains", trained)
        if self.rank is not None:
            held = f", {self.adapters} adapters in each engine" if self.adapters else ""
            table.add_row("in memory", f"{self.loaded} in the trainer{held}; others on disk")
        table.add_row("longest sequence", f"{self.max_sample_tokens:,} tokens")
        table.add_row("devices", f"{self.devices} ({self.device})")
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A service that answers.

    Attributes:
        url: Its address.
        core: What does the work.
    """

    url: str
    core: ServiceCore


def check_service(config: ServiceConfig) -> Report:
    """Return every problem that can be known before a service starts, and its plan."""

    def planned(workers: ServiceRunConfig, shapes: Mapping[str, ModelShape]) -> Plan:
        lora = workers.training.lora
        rank = None if lora is None else lora.rank
        made = plan(workers, shapes)
        given = {name: getattr(made, name) for name in Plan.__slots__}
        return ServicePlan(
            **given,
            models=config.max_models,
            rank=rank,
            loaded=config.max_loaded_models,
            adapters=config.max_loras if workers.may_send_adapters else 0,
        )

    def further(
        workers: ServiceRunConfig, renderer: Renderer | None, shape: ModelShape | None, report: Report
    ) -> Iterator[Finding]:
        del renderer, report
        yield from check_window(workers, shape, "max_sequence_tokens")
        yield from check_engines(workers, shape)
        yield from check_engine(workers)

    report = check_run(config.workers, planned, further)
    report.disk = None  # clients decide how many checkpoints there are
    return report


def run_service(config: ServiceConfig) -> None:
    """Serve until a signal asks for the end.

    Raises:
        ConfigError: The check found errors; nothing was started.
        RollLikeError: Trainer or engines did not start, or the address cannot be listened on.
    """
    report = refuse_errors(check_service(config))
    if not report.complete:
        if report.gpus is None and config.resources.device == "cuda":
            fetch_config(config.workers.model)
            refuse_errors(check_service(config))
        download_models(config.workers)
        refuse_errors(check_service(config))
    with StopSignal() as signal:
        try:
            with signal.interruptible(), serving(config, signal.lent) as service:
                url = service.url
                print(f"{config.name}: {config.base_model} at {url}, keys in {_keys_file(config)} (Ctrl-C ends it)")
                print(f"clients: TINKER_BASE_URL={url} TINKER_API_KEY=<key>", flush=True)
                threading.Event().wait()
        except StopRequested as stop:
            print(f"stopped by {stop}", flush=True)


@contextmanager
def serving(
    config: ServiceConfig, starting_ray: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[RunningService]:
    """Serve while the block runs.

    Args:
        starting_ray: Holds what Ray would take over as it starts, such as signals.
    """
    directory = config.directory
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as outer:
        outer.enter_context(locked(directory))
        keys = read_keys(config)
        if (taken := listening_error(config.host, config.port)) is not None:  # before models are loaded
            raise _not_listening(config, taken)
        workers = settled(config.workers)
        params = config.model_dump(mode="json", by_alias=True)
        writer = outer.enter_context(StatusWriter(directory, config.name, config.trackers, params))
        with starting_ray():
            resources, stack = outer.enter_context(measuring(workers, directory / "logs", watched=True))
        runner = stack.enter_context(DriverLoop())
        core = _start(config, workers, resources, stack, runner, writer)
        stack.callback(core.close)
        server = ServiceServer(
            core,
            keys,
            base_model=config.base_model,
            window=config.max_sequence_tokens,
            max_request_bytes=config.max_request_mib * 2**20,
        )
        try:
            port = runner.run(server.start(config.host, config.port))
        except OSError as error:
            raise _not_listening(config, error) from error
        stack.callback(lambda: runner.run(server.close()))
        runner.spawn(core.tidy(writer.write))
        runner.spawn(core.park_idle())
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        yield RunningService(url=f"http://{f'[{host}]' if ':' in host else host}:{port}", core=core)


def _start(
    config: ServiceConfig,
    workers: ServiceRunConfig,
    resources: ResourceManager,
    stack: ExitStack,
    runner: DriverLoop,
    writer: StatusWriter,
) -> ServiceCore:
    """Start engines and trainer side by side, and put together what does the work."""
    model = resolve_model(workers.model)
    engines = start_inference(workers, model, resources, stack, runner, adapters=config.max_loras, watched=True)
    writer.watch(engines=engines.metrics, cluster=metrics_addresses)
    stack.callback(writer.watch, engines=dict)  # before the loop ends that asks them
    adapters = config.max_loras if engines.takes_adapters else 0
    wait_for_engines = engines.begin(InferenceEngine.start)
    devices = workers.resources.devices_of("training")
    objective = RequestObjective(settings=workers.training)
    spec = rank_spec(workers, model, devices, objective, total_updates=1)
    trained = start_engine("training", spec, resources, devices, stack=stack, kind=ModelsRank)
    wait_for_engines()
    snapshots = config.directory / "snapshots"
    shutil.rmtree(snapshots, ignore_errors=True)  # of a service that was killed
    held = snapshots / "held"
    held.mkdir(parents=True)
    trainer = ModelsTrainer(
        trained,
        snapshots,
        recovery_steps=config.recovery_steps,
        max_loaded=config.max_loaded_models,
        report=resources.report,
    )
    delivery = WeightDelivery(trainer, start_weight_sync(workers, trained, engines), engines, held)
    router = engines.router(workers.inference, workers.rollout)
    loaded = load_model_config(model.path, trust_remote_code=workers.model.trust_remote_code)
    core = ServiceCore(
        config,
        trainer,
        delivery,
        lambda load: SnapshotSampler(router, engines, load, adapters=adapters),
        vocabulary=loaded.get_text_config().vocab_size,
    )
    engines.catch_up = core.catch_up
    return core


def _not_listening(config: ServiceConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"{config.host}:{config.port} cannot be listened on: {error}",
        fix="set `port` to one that is free, or to 0 for any; `host` to an address of this machine",
    )


def _keys_file(config: ServiceConfig) -> Path:
    return config.api_keys or config.directory / "api_keys"


def read_keys(config: ServiceConfig) -> list[str]:
    """Return the API keys of a service; one is made where no file was named and there is none yet.

    Raises:
        ConfigError: The file is not there, or has something else in it.
    """
    file = _keys_file(config)
    if config.api_keys is None and not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(f"{KEY_PREFIX}{secrets.token_urlsafe(32)}\n")
    try:
        keys = file.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys: {file} cannot be read: {error}", fix="name a file with a key a line") from error
    wrong = [number for number, key in enumerate(keys, 1) if not key.startswith(KEY_PREFIX) or len(key) < 12]
    if wrong or not keys:
        found = f"key {wrong[0]} is none" if wrong else "it has none"
        raise ConfigError(
            f"api_keys: {file} should have an API key a line, each {KEY_PREFIX}… with 8 further characters or more, as "
            f"the client wants them; {found}",
            fix="correct it, or leave api_keys out: then one is made",
        )
    return keys
