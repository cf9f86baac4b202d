"""Chooses how to load a tokenizer by what lies at a path."""

from pathlib import Path

from serving.tokenizer.from_folder import tokenizer_from_folder
from serving.tokenizer.from_gguf import tokenizer_from_gguf
from serving.tokenizer.interface import Tokenizer, TokenizerError


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file or of a folder with `tokenizer.json`.

    Reads files only, never the network.  Raises `TokenizerError`, `GGUFError` or `ChatTemplateError`, each a
    `ValueError`, with the remedy.
    """
    path = Path(path)
    if path.is_dir():
        return tokenizer_from_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return tokenizer_from_gguf(path)
    raise TokenizerError(f"{path}: no tokenizer here; give a .gguf file or a folder with tokenizer.json")
