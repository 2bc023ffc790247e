"""Tests of the systemd units and of the compose file, by the programs that read them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from latimer.adapter.settings import FlatSettings
from support.servers import begun

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = DEPLOY / "compose"
# The exposure that `systemd-analyze security` may compute, from 0 to 10; docs/deploy.md has it too.
EXPOSURE = {"latimer.service": 0.9, "llama-server.service": 1.2}

systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")


def output(*words: str, **variables: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=COMPOSE,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    """A unit has no unknown or wrong directive; only its program is replaced by one that exists."""
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.M))
    assert unit.name not in output("systemd-analyze", "verify", "--man=no", str(copy))


@systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened(unit: Path) -> None:
    """A unit is not more exposed than the documentation says."""
    found = output("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", found)
    assert exposure, found
    assert float(exposure[1]) <= EXPOSURE[unit.name]
    assert str(EXPOSURE[unit.name]) in (DEPLOY.parents[1] / "docs" / "deploy.md").read_text()


def test_the_unit_outlasts_the_drain() -> None:
    """systemd waits longer than the default drain before it kills the service."""
    seconds = re.search(
        r"^TimeoutStopSec=(\d+)", (DEPLOY / "systemd/latimer.service").read_text(), 8
    )
    assert seconds
    assert int(seconds[1]) > FlatSettings.model_fields["drain"].default + 5


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs docker-compose")
def test_compose_accepts_the_file() -> None:
    """docker-compose accepts the file, and all files that it mounts exist."""
    found = output("docker-compose", "config", POSTGRES_PASSWORD="a", GRAFANA_PASSWORD="b")
    services = yaml.safe_load(found)["services"]
    assert services.keys() == {"llama-server", "latimer", "postgres", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = str(volume).split(":")[0]
            # The folder of the models is the user's; names without a slash are named volumes.
            assert "/" not in source or source.endswith("/models") or Path(source).exists()
    variables = services["latimer"]["environment"]
    names = {f"LATIMER_{name}".upper() for name in FlatSettings.model_fields}
    assert variables.keys() <= names


def test_compose_needs_passwords() -> None:
    """No password has a default."""
    text = (COMPOSE / "docker-compose.yaml").read_text()
    assert re.findall(r"\$\{(\w+)(:\?)?\}", text) == [
        ("POSTGRES_PASSWORD", ":?"), ("POSTGRES_PASSWORD", ":?"), ("GRAFANA_PASSWORD", ":?"),
    ]  # fmt: skip


def test_the_tests_of_the_chart_install_their_group() -> None:
    """`make test-deploy` installs the packages of the group `deploy`, in the same versions."""
    root = DEPLOY.parents[1]
    group = tomllib.loads((root / "pyproject.toml").read_text())["dependency-groups"]["deploy"]
    assert f"pip install -q {' '.join(group)}\n" in (root / "Makefile").read_text()


def test_an_engine_that_hangs_does_not_end_its_container() -> None:
    """The liveness probe succeeds while the engine accepts connections and never answers."""
    with (
        socket.create_server(("127.0.0.1", 0)) as engine,
        begun(f"http://127.0.0.1:{engine.getsockname()[1]}") as (_, address, _),
    ):
        port = address.rpartition(":")[2]
        probe = str(DEPLOY / "probe.py")
        assert output(sys.executable, probe, "--alive", LATIMER_PORT=port) == "503\n"


def test_a_server_of_ipv6_is_probed() -> None:
    """The probe finds a server that listens on addresses of IPv6 only."""
    with (
        socket.create_server(("127.0.0.1", 0)) as engine,
        begun(f"http://127.0.0.1:{engine.getsockname()[1]}", "--host", "::1") as (_, address, _),
    ):
        port = address.rpartition(":")[2]
        probe = str(DEPLOY / "probe.py")
        assert output(sys.executable, probe, "--alive", LATIMER_PORT=port) == "503\n"
