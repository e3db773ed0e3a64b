"""The installed package: the folder `model`, under the name `token_recycling`, and nothing else.

All else about it stands in pyproject.toml, which cannot list the packages below another name, nor make a source
archive whose bytes depend on its content alone.
"""

import gzip
import os
import sys
import tarfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PREBUILT = os.environ.get("TOKEN_RECYCLING_PREBUILT") == "1"


class ReproducibleArchive(sdist):
    """A source archive with the time of SOURCE_DATE_EPOCH, where that is set, and without the builder's name.

    Wheels take their times from it by themselves.
    """

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def same_everywhere(file):
            file.mtime, file.mode = int(epoch), 0o755 if file.mode & 0o100 else 0o644
            file.uid = file.gid = 0
            file.uname = file.gname = ""
            return file

        archive = f"{base_name}.tar.gz"
        with (
            open(archive, "wb") as content,
            gzip.GzipFile("", "wb", fileobj=content, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as tar,
        ):
            tar.add(base_dir, filter=same_everywhere)
        return archive


class WithLibraries(build_py):
    """The package with its C++ compiled, where TOKEN_RECYCLING_PREBUILT is 1: a wheel that needs no compiler.

    It needs the torch of those who will install it: pip wheel --no-build-isolation.
    """

    def run(self):
        super().run()
        if PREBUILT:
            sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
            from model.build import prebuild

            prebuild(Path(self.build_lib) / "token_recycling" / "prebuilt")


class PlatformWheel(bdist_wheel):
    """A wheel for this platform, if it has compiled libraries; they depend on no version of Python."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = self.root_is_pure and not PREBUILT

    def get_tag(self):
        *_, platform = super().get_tag()
        return "py3", "none", platform


setup(
    cmdclass={
        "sdist": ReproducibleArchive,
        "build_py": WithLibraries,
        "bdist_wheel": PlatformWheel,
    },
    package_dir={"token_recycling": "model"},
    packages=["token_recycling", *(f"token_recycling.{name}" for name in find_packages("model"))],
)
