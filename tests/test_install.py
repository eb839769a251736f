"""What an editable install leaves behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_folder_above_a_clone_imports_the_package(tmp_path):
    """A clone is called jaxlm, as the package in it is: from above, `import jaxlm` must not find the clone."""
    pytest.importorskip("setuptools")
    clone, site = tmp_path / "jaxlm", tmp_path / "site"
    shutil.copytree(ROOT / "jaxlm", clone / "jaxlm", ignore=lambda folder, names: {n for n in names if "." not in n})
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    # -S leaves the tests' own installation out.
    code = f"import site; site.addsitedir({str(site)!r}); import jaxlm; print(jaxlm.__file__)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(clone / "jaxlm" / "__init__.py")
