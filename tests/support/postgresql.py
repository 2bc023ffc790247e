"""A real PostgreSQL for tests, from Debian's package; its own service is not used.

The quick tests load this module, so it imports the client of PostgreSQL only where it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.servers import free_port

# PostgreSQL refuses to run as root.
USER = "postgres"
# A user whom the server asks for a password, and who has none.
STRANGER = "stranger"
# Nothing has to survive a crash of the machine, and no test needs much memory.
OPTIONS = ("fsync=off", "full_page_writes=off", "shared_buffers=16MB", "log_statement=none")
# Ports that are tried: another process can take a free one first.
_TRIES = 5
_SECONDS = 60.0


def binaries() -> Path | None:
    """Return the folder of the newest PostgreSQL's programs, or None if there is no PostgreSQL."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda folder: float(folder.parent.name))
    program = shutil.which("initdb")
    return None if program is None else Path(program).resolve().parent


def missing() -> str | None:
    """Return the reason why tests cannot start a PostgreSQL, or None."""
    if binaries() is None:
        return "needs PostgreSQL: apt-get install postgresql"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            return f"needs the user {USER} to run PostgreSQL: apt-get install postgresql"
    return None


class PostgreSQL:
    """A PostgreSQL on 127.0.0.1 that trusts every client but `STRANGER`.

    Args:
        folder: an empty folder with a short path, for its data and its socket.
        options: more settings of the server, as `name=value`.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        found = binaries()
        assert found is not None
        self._binaries, self._folder = found, folder
        self._options = (*OPTIONS, *options)
        self._as_root = os.geteuid() == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self.port = 0
        if self._as_root:
            shutil.chown(folder, USER, USER)
        self._run(
            "initdb", "-D", str(folder / "data"), "--no-sync", "--no-instructions",
            "-A", "trust", "-U", USER, "-E", "UTF8", "--locale", "C",
        ).check_returncode()  # fmt: skip
        rules = folder / "data" / "pg_hba.conf"
        rules.write_text(f"host all {STRANGER} all scram-sha-256\n{rules.read_text()}")

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, after a stop with the same data at the same port."""
        ports = [self.port] if self.port else [free_port() for _ in range(_TRIES)]
        for port in ports:
            if self._answers(port):
                return
        raise AssertionError((self._folder / "log").read_text(errors="replace")[-5000:])

    def stop(self) -> None:
        """End the server at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_SECONDS)
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all processes of the server: it keeps its connections, and is silent."""
        assert self._process is not None
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        processes = [parent, *map(int, children)]
        for one in processes:
            os.kill(one, signal.SIGSTOP)
        try:
            yield
        finally:
            for one in processes:
                # A process that was stopped cannot have ended.
                os.kill(one, signal.SIGCONT)

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Create an empty database, yield its URL, and drop it."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        """Run a statement in the database of the server itself."""
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement.encode())

    def _answers(self, port: int) -> bool:
        """Start the server at a port; False if it ends, as if the port is in use."""
        import psycopg

        settings = [word for option in self._options for word in ("-c", option)]
        address = ["-h", "127.0.0.1", "-p", str(port), "-k", str(self._folder)]
        with (self._folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._folder / "data", *address, *settings],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                **self._identity(),
            )  # fmt: skip
        self.port = port
        deadline = time.monotonic() + _SECONDS
        while process.poll() is None:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    self.stop()
                    raise
                time.sleep(0.02)
            else:
                return True
        self.port, self._process = 0, None
        return False

    def _run(self, program: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._binaries / program, *words],
            cwd=self._folder, stdout=subprocess.DEVNULL, check=False, **self._identity(),
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        return {"user": USER, "group": USER, "extra_groups": []} if self._as_root else {}


@contextlib.contextmanager
def postgresql(*options: str) -> Iterator[PostgreSQL]:
    """Run a PostgreSQL until the block ends; a test that stops its server needs one of its own.

    Args:
        options: more settings of the server, as `name=value`.
    """
    # The folder of pytest is not open to another user, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="latimer-pg-") as folder:
        server = PostgreSQL(Path(folder), *options)
        server.start()
        try:
            yield server
        finally:
            server.stop()
