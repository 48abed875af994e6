"""Where a process of this node is reached from another one."""

from __future__ import annotations

import os
import random
import socket

import ray

#: Above those of Ray's workers, below Linux's for outgoing connections.
_PORTS = range(20_000, 32_768)
_ATTEMPTS = 50
#: Variable of processes that workers start: Ray's name of their node.
NODE = "ROLL_LIKE_NODE"


def own_node() -> str:
    """Return Ray's name of the node of this process, and let processes that it starts know it; empty if unknown.

    Nodes on one machine have one address.
    """
    if ray.is_initialized():
        os.environ[NODE] = ray.get_runtime_context().get_node_id()
    return os.environ.get(NODE, "")


def node_address() -> str:
    """Return the address by which Ray's nodes reach this one.

    The host's own name says less: on Debian it resolves to 127.0.1.1.
    """
    address: str = ray.util.get_node_ip_address()
    return address


def machine_address() -> str:
    """Return the address by which other machines reach this one, also where Ray is at 127.0.0.1 only."""
    from ray._private.services import node_ip_address_from_perspective

    address: str = node_ip_address_from_perspective()
    return address


def free_port(host: str = "") -> int:
    """Return a port of this node that nothing listens at, on one address or on all.

    Below those that Linux gives to outgoing connections: one of these may take such a port before it is listened at.
    """
    chosen = random.SystemRandom()  # training seeds the other generator, alike in all runs of a node
    for _ in range(_ATTEMPTS):
        with socket.socket() as probe:
            try:
                port = chosen.choice(_PORTS)
                probe.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        given: int = probe.getsockname()[1]
    return given
