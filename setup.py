"""Map the top-level folders to subpackages of `latimer`; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup

# What an earlier build has copied there would be installed, too, after it was deleted here.
shutil.rmtree(Path(__file__).parent / "build" / "lib", ignore_errors=True)

FOLDERS = {name: f"latimer.{name}" for name in ("adapter", "backends", "schemas")}
FOLDERS["tests/conformance"] = "latimer.conformance"

setup(
    package_dir={package: folder for folder, package in FOLDERS.items()},
    packages=[
        f"{package}.{inner}" if inner else package
        for folder, package in FOLDERS.items()
        for inner in ("", *find_packages(folder))
    ],
)
