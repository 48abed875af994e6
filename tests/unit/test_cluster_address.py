"""Where other nodes reach a process."""

from __future__ import annotations

import socket

import pytest
import ray

from roll_like.cluster.address import free_port, node_address


def test_the_address_is_rays_and_not_that_of_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Debian's /etc/hosts
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    assert node_address() == "192.0.2.7"


def test_a_free_port_can_be_listened_at() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port("127.0.0.1")))
        server.listen()
