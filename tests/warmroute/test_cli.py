"""The command line: help without weight, clear errors, settings printed with their source."""

import os
import re
import subprocess
import sys

import pytest

from warmroute.cli import COMMANDS

HEAVY = ("torch", "triton", "aiohttp", "numba", "numpy", "nats", "tokenizers", "rich", "prometheus_client")


def warmroute(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "warmroute.cli", *words],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | environ,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys\nfrom warmroute.cli import main\n"
        "try:\n    status = main([word for word in sys.argv[1:] if word])\n"
        "except SystemExit as end:\n    status = end.code\n"
        f"loaded = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "sys.exit(f'loaded {loaded}' if loaded else status or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: warmroute")


def test_help_lists_every_command() -> None:
    listed = re.findall(r"^  ([a-z]+) +\S", warmroute("--help").stdout.partition("commands:")[2], re.MULTILINE)
    assert listed[: len(COMMANDS)] == list(COMMANDS)


def test_no_command_prints_help_and_ends_as_wrong_usage() -> None:
    done = warmroute()
    assert done.returncode == 2
    assert "commands:" in done.stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("rooter",), "did you mean `warmroute router`?"),
        (("zzz",), "commands: up, worker, router"),
        (("router", "--prot", "1"), "unrecognized arguments: --prot"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
        (("router", "--port", "seventy"), "port='seventy' (from flag --port) cannot be used"),
        (("router", "--config", "nowhere.toml"), "'nowhere.toml' cannot be read"),
    ],
)
def test_wrong_usage_says_what_and_ends_with_2(words: tuple[str, ...], part: str) -> None:
    done = warmroute(*words)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_shows_values_with_their_source_and_hides_credentials() -> None:
    done = warmroute("router", "--print-config", "--nats", "nats://me:secret@broker:4222", WARMROUTE_PORT="81")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert "port = 81  # WARMROUTE_PORT" in lines
    assert 'nats = "nats://***@broker:4222"  # flag --nats' in lines
    assert "lease_s = 3.0  # default" in lines


def test_what_print_config_shows_can_be_read_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("config") / "router.toml"
    printed = warmroute("router", "--print-config", "--port", "82", "--tokenizers", "a=b").stdout
    file.write_text(printed)
    again = warmroute("router", "--print-config", WARMROUTE_CONFIG=str(file)).stdout

    def values(text: str) -> list[str]:
        return [line.partition("  #")[0] for line in text.splitlines() if not line.startswith("#")]

    assert values(again) == values(printed)
    assert f"port = 82  # {file}" in again


def test_version() -> None:
    assert re.fullmatch(r"warmroute \d+\.\d+\.\d+\n", warmroute("--version").stdout)
    assert "aiohttp " in warmroute("version", "--verbose").stdout
