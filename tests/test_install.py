"""What an editable install leaves behind, and what a wheel holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from jaxlm.cli import COMMANDS
from jaxlm.config.presets import describe_preset, preset_files
from jaxlm.errors import install as install_command

ROOT = Path(__file__).parents[1]


def install(kind: str, source: Path, site: Path) -> None:
    """Build the code in `source` as pip does, as "wheel" or "editable", and unpack it in `site`."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(site.parent)!r}))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(site.parent / built.stdout.split()[-1]) as wheel:
        wheel.extractall(site)


def test_the_folder_above_a_clone_imports_the_package(tmp_path):
    """A clone is called jaxlm, as the package in it is: from above, `import jaxlm` must not find the clone."""
    pytest.importorskip("setuptools")
    clone, site = tmp_path / "jaxlm", tmp_path / "site"
    shutil.copytree(ROOT / "jaxlm", clone / "jaxlm", ignore=lambda folder, names: {n for n in names if "." not in n})
    install("editable", clone, site)
    # -S leaves the tests' own installation out.
    code = f"import site; site.addsitedir({str(site)!r}); import jaxlm; print(jaxlm.__file__)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(clone / "jaxlm" / "__init__.py")


@pytest.mark.slow
def test_a_wheel_holds_the_presets(tmp_path):
    """They are found by name from any folder, with the checkout out of reach."""
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in ("jaxlm", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    install("wheel", source, site)
    assert sorted(path.name.partition("-")[0] for path in site.iterdir()) == ["jaxlm", "jaxlm"]  # code and metadata
    shutil.rmtree(source)
    presets = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.py")}
    assert presets == {str(path.relative_to(site / "jaxlm/presets")) for path in (site / "jaxlm/presets").rglob("*.py")}
    code = "import jaxlm.cli, sys; sys.exit(jaxlm.cli.main(['show', 'bert_bse']))"
    env = os.environ | {"PYTHONPATH": str(site)}
    said = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, capture_output=True, text=True, env=env)
    assert (said.returncode, said.stderr.count("\n")) == (2, 1) and "did you mean bert_base" in said.stderr
    (tmp_path / "text.txt").write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    shown = [sys.executable, "-m", "jaxlm.cli", "show", "bert_tiny", "--data.source", str(tmp_path / "text.txt"),
             "--data.vocab-size", "600", "--data.held-out", "0",
             "--data.cache-dir", str(tmp_path / "cache")]
    said = subprocess.run(shown, cwd=elsewhere, capture_output=True, text=True, env=env, check=True)
    assert "[MASK]" in said.stdout
    # Help names only pages that the wheel has, and messages the package instead of the clone.
    pages = re.findall(r"[\w/]+\.md", "".join(import_module(module).__doc__ for module, _ in COMMANDS.values()))
    assert "jaxlm/evaluation/vectors.md" in pages and all((site / page).is_file() for page in pages)
    assert not [text for name in preset_files() if re.search(r"configs/|\.md", text := describe_preset(name))]
    said = subprocess.run([sys.executable, "-c", "from jaxlm.errors import install; print(install('wandb'))"],
                          cwd=elsewhere, capture_output=True, text=True, env=env, check=True)
    assert said.stdout == "run `pip install 'jaxlm[wandb]'`\n" and install_command("wandb").startswith("in the clone, ")
