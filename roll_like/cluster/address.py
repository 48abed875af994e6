"""Where a process of this node is reached from another one."""

from __future__ import annotations

import socket

import ray


def node_address() -> str:
    """Return the address by which Ray's nodes reach this one.

    The host's own name says less: on Debian it resolves to 127.0.1.1.
    """
    address: str = ray.util.get_node_ip_address()
    return address


def free_port(host: str = "") -> int:
    """Return a port of this node that nothing listens at, on one address or on all."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
