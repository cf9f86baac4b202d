"""Settings: precedence, conversion, and errors that say field, value, source and remedy."""

import argparse
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from serving.config import ConfigError, add_flags, describe, load, resolve


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """What the tests configure."""

    model: Annotated[str, Meta(description="the model")]
    port: Annotated[int, Meta(description="where to listen", ge=0, le=65535)] = 8000
    ratio: Annotated[float, Meta(description="100 % is 1", gt=0)] = 0.5
    json: Annotated[bool, Meta(description="JSON lines")] = False
    tokenizers: Annotated[dict[str, str], Meta(description="name to file")] = {}
    seed: Annotated[int | None, Meta(description="absent = random")] = None
    mode: Annotated[Literal["fast", "exact"], Meta(description="how")] = "fast"


def flags(*words: str) -> dict[str, Any]:
    """What the command line leaves in the namespace."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    return vars(parser.parse_args(words))


def read(*words: str, file: Path | None = None, **environ: str) -> Settings:
    """Settings from a command line, a file and variables."""
    return load(Settings, flags=flags(*words), file=file, environ=environ)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nport = 3\nratio = 3\nseed = 3\n')
    got = read("--port", "1", file=file, WARMROUTE_PORT="2", WARMROUTE_RATIO="2.5")
    assert (got.port, got.ratio, got.seed, got.mode) == (1, 2.5, 3, "fast")


def test_every_value_remembers_its_source(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 3\n")
    resolved = resolve(Settings, flags=flags("--model", "m"), file=file, environ={"WARMROUTE_JSON": "true"})
    assert dict(resolved.origins) == {
        "model": "flag --model", "port": "default", "ratio": "default", "json": "WARMROUTE_JSON",
        "tokenizers": "default", "seed": str(file), "mode": "default",
    }  # fmt: skip
    assert resolved.config.json is True


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "c.toml", tmp_path / "c.yml"
    toml.write_text('model = "m"\n[tokenizers]\na = "b"\n')
    yaml.write_text("model: m\ntokenizers:\n  a: b\n")
    assert read(file=toml) == read(file=yaml) == Settings(model="m", tokenizers={"a": "b"})


def test_an_empty_yaml_file_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert read("--model", "m", file=file) == Settings(model="m")


@pytest.mark.parametrize(("word", "value"), [("--json", True), ("--no-json", False)])
def test_a_boolean_is_a_pair_of_flags(word: str, value: bool) -> None:
    assert read("--model", "m", word, WARMROUTE_JSON="true" if not value else "false").json is value


def test_a_mapping_is_a_repeated_flag_or_a_list_in_a_variable() -> None:
    expected = {"a": "x=y", "b": "z"}
    assert read("--model", "m", "--tokenizers", "a=x=y", "--tokenizers", "b=z").tokenizers == expected
    assert read("--model", "m", WARMROUTE_TOKENIZERS="a=x=y, b=z").tokenizers == expected


@pytest.mark.parametrize(
    ("words", "environ", "parts"),
    [
        (["--port", "70000"], {}, ["port='70000'", "flag --port", "<= 65535", "WARMROUTE_PORT"]),
        (["--port", "x"], {}, ["port='x'", "flag --port", "int"]),
        ([], {"WARMROUTE_RATIO": "-1"}, ["ratio='-1'", "WARMROUTE_RATIO", "> 0", "--ratio"]),
        (["--mode", "slow"], {}, ["mode='slow'", "flag --mode"]),
        (["--tokenizers", "a"], {}, ["tokenizers", "'a'", "NAME=VALUE"]),
    ],
)
def test_an_error_names_field_value_source_and_remedy(
    words: list[str], environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        read("--model", "m", *words, **environ)
    for part in parts:
        assert part in str(error.value)


def test_a_missing_required_setting_says_all_three_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"model is not set .*--model, WARMROUTE_MODEL or `model`"):
        read()


def test_an_unknown_key_of_a_file_is_an_error_with_a_guess(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"`prot` is no setting.*did you mean `port`"):
        read("--model", "m", file=file)


@pytest.mark.parametrize(("name", "content"), [("c.toml", "port = "), ("c.yaml", "a: [1"), ("c.yaml", "- 1\n")])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError, match=name):
        read("--model", "m", file=file)


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read("--model", "m", file=tmp_path / "nowhere.toml")


def test_help_shows_description_and_default_and_survives_a_percent_sign() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "where to listen (default: 8000)" in text
    assert "100 % is 1 (default: 0.5)" in text
    assert "{fast,exact}" in text


def test_the_reference_has_a_row_for_every_field() -> None:
    rows = describe(Settings)
    assert [row[0] for row in rows] == list(Settings.__struct_fields__)
    assert rows[1] == ("port", "--port", "WARMROUTE_PORT", "8000", "where to listen")
