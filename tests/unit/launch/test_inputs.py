"""What a run needs of this machine, said before anything is made."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from async_rl.config import RunConfig
from async_rl.errors import ConfigError
from async_rl.launch import inputs
from async_rl.launch.devices import split_devices
from async_rl.launch.inputs import require_hosts


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "/m"}, **sections})


@pytest.fixture(autouse=True)
def _resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name server is asked: `known` is this machine, 192.0.2.1 (a documentation address) is another one."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        names = {"known": "127.0.0.1", "127.0.0.1": "127.0.0.1", "elsewhere": "192.0.2.1"}
        if host not in names:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_addresses_of_this_machine_pass() -> None:
    require_hosts(config())
    require_hosts(config(weights={"host": "known"}, redis={"url": "redis://elsewhere:6379/0"}))


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"weights": {"host": "nowhere"}}, ["weights.host='nowhere' cannot be resolved", "127.0.0.1"]),
        ({"weights": {"host": ""}}, ["weights.host='' cannot be resolved"]),
        ({"weights": {"host": "elsewhere"}}, ["weights.host='elsewhere' is no address of this machine"]),
        ({"redis": {"url": "redis://u:secret@nowhere/0"}}, ["redis.url names host 'nowhere'", "cannot resolve"]),
    ],
)
def test_other_addresses_are_refused(sections: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        require_hosts(config(**sections))
    for part in parts:
        assert part in str(error.value)
    assert "secret" not in str(error.value)


def test_where_no_store_is_used_its_address_does_not_matter() -> None:
    require_hosts(config(weights={"host": "nowhere", "backend": "disk"}))


def test_a_resolver_that_does_not_answer_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "RESOLVE_S", 0.0)
    monkeypatch.setattr(inputs.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(inputs.threading.Thread, "join", lambda self, timeout: None)
    require_hosts(config(weights={"host": "nowhere"}))


@pytest.mark.parametrize(
    ("sections", "asked"),
    [
        ({"trainer": {"device": "cuda"}}, "trainer.device='cuda', but"),
        ({"trainer": {"device": "cuda"}, "rollout": {"device": "cuda:0"}}, "trainer.device='cuda' and rollout.device='cuda:0'"),
    ],
)
def test_cuda_without_a_gpu_is_named(sections: dict[str, Any], asked: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is empty; set cpu, or make one visible") as error:
        split_devices(config(**sections), {"CUDA_VISIBLE_DEVICES": ""})
    assert str(error.value).startswith(asked)
