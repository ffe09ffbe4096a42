"""What a server says when it is ready, and how it is known to be."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from kvortex.vllm_plugin.banner import banner, base_url
from kvortex.vllm_plugin.watch import is_listening
from tests.environment import skip_without_address

STATS = {
    "model": "m",
    "block_size": 128,
    "tiers": {
        "vram": {"capacity_bytes": 24 * 10**9, "capacity_blocks": 1430},
        "ram": {"capacity_bytes": 64 * 10**9, "capacity_blocks": 3814},
    },
}


def test_it_says_what_each_tier_holds_and_where_to_look() -> None:
    lines = banner(STATS, "http://localhost:8000", {"/kvortex/stats", "/metrics", "/health"}).splitlines()
    assert lines == [
        "KVortex is ready: m on http://localhost:8000",
        "  VRAM  24 GB, 1,430 blocks of 128 tokens: up to 183,040 tokens, 22 conversations of 8,192",
        "  RAM   64 GB, 3,814 blocks of 128 tokens: up to 488,192 tokens, 59 conversations of 8,192",
        "  look  kvortex inspect --url http://localhost:8000",
        "        http://localhost:8000/kvortex/stats  http://localhost:8000/metrics",
    ]


def test_a_page_is_named_where_there_is_one() -> None:
    assert "u/kvortex/dashboard" in banner(STATS, "u", {"/kvortex/dashboard"})


@pytest.mark.parametrize(
    ("args", "url"),
    [
        ({"host": None}, "http://localhost:8000"),
        ({"host": "0.0.0.0"}, "http://localhost:8000"),
        ({"host": "127.0.0.1", "ssl_certfile": "c"}, "https://127.0.0.1:8000"),
        ({"host": "::1"}, "http://[::1]:8000"),
        ({"host": None, "uds": "/run/k.sock"}, "unix:/run/k.sock"),
    ],
)
def test_the_address_is_one_to_connect_to(args: dict[str, str | None], url: str) -> None:
    assert base_url(Namespace(port=8000, **args)) == url


@pytest.mark.parametrize("host", [None, "0.0.0.0", "127.0.0.1", "::1"])
def test_a_server_is_ready_when_it_listens_not_when_it_is_bound(host: str | None) -> None:
    skip_without_address(host or "127.0.0.1")
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host or "127.0.0.1", 0))
        args = Namespace(host=host, port=server.getsockname()[1], uds=None)
        assert not is_listening(args)
        server.listen()
        assert is_listening(args)


def test_a_unix_socket_is_asked_by_its_path(tmp_path: Path) -> None:
    args = Namespace(host=None, port=1, uds=str(tmp_path / "s"))
    assert not is_listening(args)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(args.uds)
        server.listen()
        assert is_listening(args)
