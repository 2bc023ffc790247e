"""Commands in an environment, shared by the tests of several extras."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.environments import Environment, program
from support.servers import free_port

WALK = """
import importlib, pkgutil, sys
without, count, failures = tuple(sys.argv[1].split()), 0, []
for root in sys.argv[2:]:
    package = importlib.import_module(root)
    for one in pkgutil.walk_packages(package.__path__, root + ".", lambda name: None):
        if one.name.startswith(without):
            continue
        try:
            importlib.import_module(one.name)
            count += 1
        except Exception as error:
            failures.append(f"{one.name}: {error!r}")
print(count)
sys.exit("\\n".join(failures) or None)
"""


def imported(environment: Environment, *packages: str, without: str = "") -> int:
    """Import every module of some packages and return their number.

    Args:
        without: the beginnings of the names of modules to skip, with spaces between them.
    """
    return int(environment.run("python", "-c", WALK, without, *packages).stdout)


@contextmanager
def serving(environment: Environment, *words: str, **more: str) -> Iterator[str]:
    """Run `latimer serve` in an environment and yield its address."""
    port = str(free_port())
    address = f"http://127.0.0.1:{port}"
    variables = environment.variables(LATIMER_PORT=port, **more)
    with program(("latimer", "serve", *words), f"{address}/health", variables, environment.work):
        yield address
