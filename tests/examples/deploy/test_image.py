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
RAY = "latimer.adapter.ray_serve"
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


def images() -> Sequence[str]:
    """Return the names of the images that were built, if the tests can run."""
    if os.geteuid() or not all(map(shutil.which, ("buildah", "bwrap"))):
        return ()
    return buildah("images", "--format", "{{.Name}}").splitlines()


IMAGES = images()


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "localhost/latimer-engine" not in IMAGES,
        reason="needs root, buildah, bwrap and `make image`",
    ),
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

    def command(self, *words: str, port: int = 0, volumes: Sequence[str] = ()) -> Sequence[str]:
        """Return the command that runs words in the image, with its own environment.

        Args:
            volumes: further options of bubblewrap.
        """
        variables = dict(one.split("=", 1) for one in self.config["Env"])
        variables |= {"LATIMER_PORT": str(port), "LATIMER_HOST": "127.0.0.1"}
        models = str(DEMO_MODEL.resolve().parent)
        return (
            "bwrap", "--ro-bind", self._root, "/", "--ro-bind", models, "/mnt",
            "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", TMP,
            *volumes, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent",
            "--clearenv",
            *(word for name, value in variables.items() for word in ("--setenv", name, value)),
            *DROP, *words,
        )  # fmt: skip

    def output(self, *words: str, port: int = 0) -> str:
        """Return what a command prints in the image."""
        done = subprocess.run(
            self.command(*words, port=port), capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["latimer", "latimer-engine", "latimer-ray"])
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """Yield each image."""
    if f"localhost/{request.param}" not in IMAGES:
        pytest.skip("make image-ray builds it")
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
    """The proxy serves an engine elsewhere, the other images a GGUF file; all end with a drain."""
    model = llama_server_url if image.name == "latimer" else "/mnt/demo.gguf"
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


@pytest.mark.timeout(300)
def test_ray_serves_in_its_image(image: Image, tmp_path: Path) -> None:
    """The image with Ray has the programs that KubeRay calls, and Ray Serve runs in it."""
    if image.name != "latimer-ray":
        pytest.skip("without Ray")
    # What KubeRay and the chart start. KubeRay's shell has the image's PATH.
    found = image.output("/bin/bash", "-c", "--", "command -v ray serve grep timeout")
    assert len(found.split()) == 4
    port = free_port()
    one = {
        "name": "latimer",
        "import_path": f"{RAY}:app",
        "args": {"model": "/mnt/demo.gguf"},
        "deployments": [{"name": "Latimer", "ray_actor_options": {"num_cpus": 0.1}}],
    }
    config = {"http_options": {"port": port}, "applications": [one]}
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    # As the kubelet writes it: Ray looks for localhost.
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    tmp_path.chmod(0o755)
    volumes = (
        "--ro-bind", str(tmp_path), "/srv", "--ro-bind", str(tmp_path / "hosts"), "/etc/hosts",
        "--perms", "1777", "--tmpfs", "/dev/shm",  # noqa: S108
    )  # fmt: skip
    words = image.command("python", "-m", RAY, "/srv/serve.yaml", port=port, volumes=volumes)
    path = {"PATH": os.environ["PATH"]}
    address = f"http://127.0.0.1:{port}"
    with program(words, f"{address}/health", path, tmp_path, seconds=200, stop=child):
        assert ask(address) == "The capital of France is Paris."


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
