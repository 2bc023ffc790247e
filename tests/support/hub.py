"""A hub on the loopback with five repositories made from the demo model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import gguf
from latimer.backends.llama_cpp import DEMO_MODEL
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from support import gguf_files
from support.projector import projector
from support.reader import DEMO_WIDTH
from support.servers import serving

# What opens the gated and the private repository.
TOKEN = "hf_" + "a" * 37
COMMIT = "1" * 40
DEMO = DEMO_MODEL.read_bytes()

Repos = Mapping[str, Mapping[str, bytes]]


def split_demo(folder: Path) -> dict[str, bytes]:
    """Return the demo model in four files, as llama-gguf-split writes them."""
    tensors = len(gguf.GGUFReader(DEMO_MODEL).tensors)
    gguf_files.copy(DEMO_MODEL, folder / "demo-Q8_0.gguf", tensors_a_part=-(-tensors // 4))
    parts = {path.name: path.read_bytes() for path in sorted(folder.glob("demo-Q8_0-*.gguf"))}
    assert len(parts) == 4
    return parts


def repositories(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of the five repositories.

    The quantizations of `test/quants` are the demo model under several names. A byte behind the
    tensors, which llama.cpp ignores, makes each file another blob.
    """
    eye = projector(folder / "mmproj.gguf", DEMO_WIDTH).read_bytes()
    names = ("BF16", "IQ4_XS", "Q2_K", "Q4_K_M", "Q8_0", "UD-Q4_K_M")
    quants = {f"demo-{name}.gguf": DEMO + name.encode() for name in names}
    return {
        "test/quants": {".gitattributes": b"*.gguf filter=lfs\n", "README.md": b"# Demo\n",
                        **quants, "imatrix.gguf": b"GGUF"},
        "test/split": {f"Q8_0/{name}": data for name, data in split_demo(folder).items()},
        "test/vision": {"demo-Q4_K_M.gguf": DEMO, "demo-Q8_0.gguf": DEMO + b"8",
                        "mmproj-demo-BF16.gguf": eye + b"16", "mmproj-demo-Q8_0.gguf": eye},
        "test/gated": {"demo-Q8_0.gguf": DEMO},
        "test/private": {"demo-F16.gguf": DEMO},
    }  # fmt: skip


def oid_of(data: bytes, is_large: bool) -> str:
    """Return the SHA-256 of a large file, or git's object id of a small one."""
    if is_large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()  # noqa: S324


class TestHub:
    """The app of a hub.

    Attributes:
        repos: the files of each repository, by path.
        asked: the methods and paths of all requests.
        ranges: the ranges of the requests for the content of large files; None for whole files.
        cut: bytes after which the body of a large file ends; None for whole files.
        stalls: True if such a body then sends nothing more until this is False, and then the rest.
        wrong: paths of files whose content is not that of their checksum.
        range_ignored: True if ranges are answered with whole files.
        cuts_heads: True if `cut` is also for a request for the beginning of a file.
    """

    __test__ = False

    def __init__(self, repos: Repos) -> None:
        self.repos = {repo: dict(files) for repo, files in repos.items()}
        self.asked: list[str] = []
        self.ranges: list[str | None] = []
        self.cut: int | None = None
        self.stalls = False
        self.wrong: set[str] = set()
        self.range_ignored = False
        self.cuts_heads = False
        self.app = Starlette(
            routes=[
                Route("/api/models/{org}/{repo}/refs", self._refs),
                Route("/api/models/{org}/{repo}/revision/{revision:path}", self._info),
                Route("/api/models/{org}/{repo}/tree/{revision}", self._tree),
                Route("/api/models/{org}/{repo}", self._info),
                Route("/cdn/{org}/{repo}/{path:path}", self._cdn),
                Route("/{org}/{repo}/resolve/{revision}/{path:path}", self._resolve),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer of a request without permission, or for a missing repository."""
        self.asked.append(f"{request.method} {request.url.path}")
        given = request.headers.get("authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            return _error(401, "", "Invalid credentials in Authorization header")
        repo = _repo(request)
        if repo not in self.repos or (repo == "test/private" and given is None):
            return _error(404 if given else 401, "RepoNotFound", "Repository not found")
        if repo == "test/gated" and given is None and "/resolve/" in request.url.path:
            return _error(401, "GatedRepo", "Access to model test/gated is restricted")
        revision = unquote(request.path_params.get("revision", "main"))
        if revision not in ("main", "v1", COMMIT):
            return _error(404, "RevisionNotFound", "Invalid rev id")
        return None

    async def _refs(self, request: Request) -> Response:
        branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}
        return self._refusal(request) or JSONResponse(
            {"branches": [branch], "tags": [], "converts": []}
        )

    async def _info(self, request: Request) -> Response:
        repo = _repo(request)
        return self._refusal(request) or JSONResponse(
            {"id": repo, "sha": COMMIT, "private": False, "gated": False,
             "siblings": [{"rfilename": path} for path in self.repos[repo]]}
        )  # fmt: skip

    async def _tree(self, request: Request) -> Response:
        refusal = self._refusal(request)
        return refusal or JSONResponse(
            [_row(path, data) for path, data in sorted(self.repos[_repo(request)].items())]
        )

    async def _resolve(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        repo, path = _repo(request), request.path_params["path"]
        data = self.repos[repo].get(path)
        if data is None:
            return _error(404, "EntryNotFound", "Entry not found")
        is_large = path.endswith(".gguf")
        oid = oid_of(data, is_large)
        headers = {"x-repo-commit": COMMIT, "etag": f'"{oid}"', "accept-ranges": "bytes"}
        if is_large:
            # As the hub does for large files: the metadata is on a redirect to another host.
            place = f"http://localhost:{request.url.port}/cdn/{repo}/{path}"
            headers |= {"x-linked-etag": f'"{oid}"', "x-linked-size": str(len(data)),
                        "location": place}  # fmt: skip
            return Response(status_code=302, headers=headers)
        return self._content(request, data, headers)

    async def _cdn(self, request: Request) -> Response:
        self.asked.append(f"{request.method} {request.url.path}")
        if "authorization" in request.headers:
            return _error(400, "", "A token must not be sent to another host")
        self.ranges.append(request.headers.get("range"))
        path = request.path_params["path"]
        data = self.repos[_repo(request)][path]
        if path in self.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self._content(request, data, {"etag": '"of-the-cdn"', "accept-ranges": "bytes"})

    def _content(self, request: Request, data: bytes, headers: Mapping[str, str]) -> Response:
        wanted, status, more = request.headers.get("range"), 200, dict(headers)
        if wanted is not None and not self.range_ignored:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            if start >= len(data):
                return Response(status_code=416, headers={"content-range": f"bytes */{len(data)}"})
            more["content-range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        if request.method == "HEAD":
            return Response(status_code=status, headers={**more, "content-length": str(len(data))})
        cut, is_head = self.cut, "bytes=0-" in (wanted or "")
        if cut is not None and len(data) > cut and (self.cuts_heads or not is_head):
            if self.stalls:
                more["content-length"] = str(len(data))
                return StreamingResponse(self._halting(data, cut), status, more)
            return _Cut(data[:cut], status_code=status, headers=more, length=len(data))
        return Response(data, status_code=status, headers=more)

    async def _halting(self, data: bytes, cut: int) -> AsyncIterator[bytes]:
        yield data[:cut]
        while self.stalls:
            await asyncio.sleep(0.02)
        yield data[cut:]


class _Cut(Response):
    """A response whose connection ends before its length."""

    def __init__(self, data: bytes, *, length: int, **options: Any) -> None:
        super().__init__(data, **options)
        self.headers["content-length"] = str(length)


def _repo(request: Request) -> str:
    return f"{request.path_params['org']}/{request.path_params['repo']}"


def _row(path: str, data: bytes) -> dict[str, object]:
    row: dict[str, object] = {
        "type": "file", "path": path, "size": len(data), "oid": oid_of(data, False),
    }  # fmt: skip
    if path.endswith(".gguf"):
        row["lfs"] = {"oid": oid_of(data, True), "size": len(data), "pointerSize": 134}
    return row


def _error(status: int, code: str, message: str) -> Response:
    headers = {"x-error-message": message}
    if code:
        headers["x-error-code"] = code
    return JSONResponse({"error": message}, status, headers)


@contextmanager
def hub(repos: Repos) -> Iterator[tuple[TestHub, str]]:
    """Serve repositories; yield the hub and its address."""
    made = TestHub(repos)
    with serving(lambda: made.app, "h11") as address:
        yield made, address
