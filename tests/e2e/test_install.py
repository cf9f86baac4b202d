"""The router's own installation, as its container makes it: small, and without torch."""

import json
import subprocess
import urllib.request
import venv
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from warmroute.up.broker import LogReader, command

from .processes import Running

ROOT = Path(__file__).parents[2]
PACKAGES = ("context", "kvevents", "serving", "worker", "router", "warmroute")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_router_extra_in_an_empty_environment_starts_the_router_without_torch(tmp_path: Path) -> None:
    source, environment = tmp_path / "source", tmp_path / "venv"
    for name in PACKAGES:
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{source}[router]"],
        check=True, timeout=500,
    )  # fmt: skip
    assert subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode != 0
    broker = Running(command(0), tmp_path / "broker.log", parse=LogReader())
    try:
        words = [str(environment / "bin" / "warmroute"), "router", "--port", "0", "--nats", broker.wait_ready()]
        router = Running(words, tmp_path / "router.log")
        try:
            with urllib.request.urlopen(f"{router.wait_ready()}/health", timeout=10) as response:
                assert json.load(response)["bus_connected"] is True
        finally:
            assert router.stop() == 0
    finally:
        broker.stop()
    worker = subprocess.run(
        [str(environment / "bin" / "warmroute"), "worker"], capture_output=True, text=True, timeout=60, check=False
    )
    assert worker.returncode == 3
    assert "pip install 'warmroute[worker]'" in worker.stderr
