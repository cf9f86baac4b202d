"""Writes docs/configuration.md from the settings in the code: `make docs`; a test holds that it is up to date."""

from pathlib import Path

from router.config import RouterConfig
from serving.config import describe
from warmroute.up_config import UpConfig
from worker.config import WorkerConfig

TARGET = Path(__file__).parent / "configuration.md"

_HEAD = """# Configuration

Generated from the code by `make docs`; do not edit.

Every setting can be given in three ways. A flag wins over the environment, which wins over the file, which wins over
the default:

```toml
# router.toml, for: warmroute router --config router.toml   (or WARMROUTE_CONFIG=router.toml)
port = 8000
nats = "nats://broker:4222"

[tokenizers]
"smollm2-135m-instruct" = "smollm2"
```

A file ends in `.toml`, `.yaml` or `.yml`. An unknown key in a file and an unknown flag are errors; other variables that
begin with `WARMROUTE_` are ignored, since the commands share the prefix. `--print-config` prints every value with its
source and ends; passwords in URLs are hidden. Booleans are a pair of flags, `--log-json` and `--no-log-json`; mappings
are a flag that may be repeated, `--tokenizers NAME=VALUE`, or `NAME=VALUE,NAME=VALUE` in the environment.

The settings of the workers and the router that `warmroute up` starts come from its own; those that it has no name for
can be given by their variables.
"""


def reference() -> str:
    """The whole page."""
    parts = [_HEAD]
    for command, kind in (("up", UpConfig), ("worker", WorkerConfig), ("router", RouterConfig)):
        parts.append(f"\n## warmroute {command}\n\n| flag | variable | default | what it is |\n|--|--|--|--|\n")
        parts += [
            f"| `{flag}` | `{variable}` | {default} | {text} |\n" for _, flag, variable, default, text in describe(kind)
        ]
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(reference())
