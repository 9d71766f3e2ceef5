"""Finds the packages for the wheel, and what lies beside their modules. Everything else is in
pyproject.toml.

In the checkout `diloco`, `inner` and `outer` lie side by side. In a wheel `inner` and `outer` are
inside `diloco/_bundled`, so that installing this project puts the one name `diloco` beside other
people's packages (docs/decisions/0015-one-name-in-the-wheel.md).
"""

from setuptools import find_packages, setup

BUNDLED = ("inner", "outer")
inside = [package for name in BUNDLED for package in find_packages(include=[name, f"{name}.*"])]

setup(
    packages=find_packages(include=["diloco", "diloco.*"])
    + [f"diloco._bundled.{package}" for package in inside],
    package_dir={f"diloco._bundled.{name}": name for name in BUNDLED},
    package_data={
        "diloco.report": ["*.jinja"],
        "diloco.config": ["*.yaml"],
        "diloco.watch": ["page/*"],
        "diloco.launch_files": ["*.sh"],
    },
)
