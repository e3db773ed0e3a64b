"""The installed package: the folder `model`, under the name `token_recycling`, and nothing else.

All else about it stands in pyproject.toml, which cannot list the packages below another name.
"""

from setuptools import find_packages, setup

setup(
    package_dir={"token_recycling": "model"},
    packages=["token_recycling", *(f"token_recycling.{name}" for name in find_packages("model"))],
)
