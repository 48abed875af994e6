"""Serialisation with the recorded list of what may be unpickled, and process groups."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

from sglang.recorded import RECORD, with_signature


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in RECORD["picklable"]:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return super().find_class(module, name)


class MultiprocessingSerializer:
    @staticmethod
    @with_signature("MultiprocessingSerializer.serialize")
    def serialize(obj: Any, output_str: bool) -> bytes:
        assert not output_str
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(obj)
        return buffer.getvalue()

    @staticmethod
    @with_signature("MultiprocessingSerializer.deserialize")
    def deserialize(data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data)).load()


@with_signature("init_custom_process_group")
def init_custom_process_group(
    backend: str,
    init_method: str,
    timeout: Any,
    world_size: int,
    rank: int,
    store: Any,
    group_name: str,
    pg_options: Any,
    device_id: Any,
) -> Any:
    """Return a process group beside the default one; rank 0 serves the store."""
    assert timeout is store is pg_options is device_id is None
    host, port = init_method.removeprefix("tcp://").rsplit(":", 1)
    limit = timedelta(seconds=60)
    tcp = TCPStore(host.strip("[]"), int(port), world_size, is_master=rank == 0, timeout=limit)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(group_name, tcp), group_name=group_name, timeout=limit
    )
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group
