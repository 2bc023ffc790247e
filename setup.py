"""Map the top-level folders to subpackages of `latimer`; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

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
