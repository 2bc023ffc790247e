"""Tests of the images that `make image` builds: they run without root, and write only to /tmp.

buildah mounts an image, and bubblewrap runs it with the restrictions of examples/deploy: no root,
no capabilities, a read-only file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.llama_cpp import DEMO_MODEL
from support.environments import ask, program
from support.servers import free_port

BUILDAH = ("buildah", "--storage-driver", "vfs")
USER = "10001"
VERSION = version("latimer")
# The only folder that can be written, in the image.
TMP = "/tmp"  # noqa: S108
PROBE = "/usr/local/lib/latimer/probe.py"
# What the user of the image becomes: one without capabilities, now and later.
DROP = (
    "setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", "--bounding-set=-all",
    "--no-new-privs",
)  # fmt: skip


def buildah(*words: str) -> str:
    """Return the output of a command of buildah."""
    done = subprocess.run([*BUILDAH, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_images() -> bool:
    """Return True if the tests can run, and the images were built."""
    if os.geteuid() or not all(map(shutil.which, ("buildah", "bwrap"))):
        return False
    return "localhost/latimer-engine" in buildah("images", "--format", "{{.Name}}")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_images(), reason="needs root, buildah, bwrap and `make image`"),
]


class Image:
    """A mounted image.

    Attributes:
        config: its configuration, as `docker inspect` shows it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.container = buildah("from", "--pull-never", f"localhost/{name}:{VERSION}")
        self._root = buildah("mount", self.container)
        facts = json.loads(buildah("inspect", self.container))
        self.config: dict[str, Any] = facts["Docker"]["config"]

    def command(self, *words: str, port: int = 0) -> Sequence[str]:
        """Return the command that runs words in the image, with its own environment."""
        variables = dict(one.split("=", 1) for one in self.config["Env"])
        variables |= {"LATIMER_PORT": str(port), "LATIMER_HOST": "127.0.0.1"}
        models = str(DEMO_MODEL.resolve().parent)
        return (
            "bwrap", "--ro-bind", self._root, "/", "--ro-bind", models, "/mnt",
            "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", TMP,
            "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *DROP, *words,
        )  # fmt: skip

    def output(self, *words: str, port: int = 0) -> str:
        """Return what a command prints in the image."""
        done = subprocess.run(
            self.command(*words, port=port), capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["latimer", "latimer-engine"])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """Yield each image."""
    found = Image(request.param)
    yield found
    buildah("rm", found.container)


def test_the_user_is_not_root(image: Image) -> None:
    """The image names a user without a name or rights on the host."""
    assert image.config["User"] == f"{USER}:{USER}"
    assert image.output("id", "-u").strip() == USER
    assert "CapEff:\t0000000000000000" in image.output("cat", "/proc/self/status")


def test_nothing_is_writable(image: Image) -> None:
    """The root file system is read-only here, and only /tmp can be written."""
    for folder in ("/", "/opt/latimer", "/usr/local/lib/latimer"):
        assert "Read-only file system" in image.output("touch", f"{folder}/file")
    assert image.output("touch", f"{TMP}/file") == ""


def test_no_installer_is_left(image: Image) -> None:
    """The environment in the image has no pip, and no sources of Latimer."""
    assert "No module named pip" in image.output("/opt/latimer/bin/python", "-m", "pip")
    assert "No such file" in image.output("ls", "/src")
    assert "latimer, version" in image.output("latimer", "--version")


def test_it_serves(image: Image, llama_server_url: str, tmp_path: Path) -> None:
    """The proxy serves an engine elsewhere, the other image a GGUF file; both end with a drain."""
    model = "/mnt/demo.gguf" if image.name == "latimer-engine" else llama_server_url
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    words = image.command(*image.config["Entrypoint"], *image.config["Cmd"], model, port=port)
    path = {"PATH": os.environ["PATH"]}
    # bubblewrap passes no signal on; it ends with its first process, which is Latimer.
    with program(words, f"{address}/health", path, tmp_path, stop=child):
        assert ask(address) == "The capital of France is Paris."
        for argument in ("/health", "/ready", "--alive"):
            assert image.output("python3", PROBE, argument, port=port) == "200\n"
        assert image.output("python3", PROBE, "/unknown", port=port) == "404\n"


def test_the_health_check_fails_without_a_server(image: Image) -> None:
    """The image's health check is the probe, which says that nothing responds."""
    check = image.config["Healthcheck"]["Test"]
    assert check == ["CMD", "python3", PROBE, "/health"]
    assert "Latimer does not respond" in image.output(*check[1:], port=free_port())


def child(process: int) -> int:
    """Return the innermost first child of bubblewrap."""
    while found := Path(f"/proc/{process}/task/{process}/children").read_text().split():
        name = Path(f"/proc/{process}/comm").read_text().strip()
        if name != "bwrap":
            break
        process = int(found[0])
    return process
