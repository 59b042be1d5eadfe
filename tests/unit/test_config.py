"""Options: one schema, one precedence, nothing read past."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sglang_eagle3_ext import config
from sglang_eagle3_ext.errors import RefusedError

REPOSITORY = Path(__file__).parents[2]

# A valid value of each option per layer: flag text, environment, manifest; and what each becomes.
VALUES = {
    "taps": ("embed, resid@2", ["out@1"], ["final_norm"], ("embed", "resid@2"), ("out@1",), ("final_norm",)),
    "kernels": ("own", "sglang", "auto", "own", "sglang", "auto"),
    "accept_alarm": ("1.5", 2, 0, 1.5, 2, 0),
    "accept_alarm_rounds": ("7", 8, 9, 7, 8, 9),
}


def parse(*words: str) -> dict[str, str]:
    """The flags that argparse leaves behind for ``words``."""
    parser = argparse.ArgumentParser(prog="server")
    config.add_flags(parser)
    return dict(getattr(parser.parse_args(list(words)), config.NAMESPACE_FLAGS, {}))


def environ(flags: dict[str, str] | None = None, **variables: str) -> dict[str, str]:
    return {**({config.FLAGS_ENVIRONMENT: json.dumps(flags)} if flags else {}), **variables}


def manifest(folder: Path, **keys: object) -> Path:
    (folder / config.MANIFEST).write_text(json.dumps({"schema": 1, **keys}), encoding="utf-8")
    return folder


def refusal(draft: Path | None = None, **variables: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        config.resolve(draft, variables)
    return caught.value


def test_every_option_is_covered_here() -> None:
    assert set(VALUES) == set(config.OPTIONS)


@pytest.mark.parametrize("name", VALUES)
def test_precedence(name: str, tmp_path: Path) -> None:
    flag_text, in_environment, in_manifest, *became = VALUES[name]
    option = config.OPTIONS[name]
    flags = parse(option.flag, str(flag_text))
    draft = manifest(tmp_path, **{name: in_manifest})
    variable = json.dumps({name: in_environment})

    def look(draft: Path | None, environment: dict[str, str]) -> tuple[object, str]:
        resolved = config.resolve(draft, environment)
        return getattr(resolved.values, name), resolved.sources[name]

    assert look(draft, environ(flags, EAGLE3X_CONFIG=variable)) == (became[0], option.flag)
    assert look(draft, environ(EAGLE3X_CONFIG=variable)) == (became[1], "EAGLE3X_CONFIG")
    assert look(draft, {}) == (became[2], str(tmp_path / config.MANIFEST))
    assert look(None, {}) == (option.default, "default")


def test_layers_merge_key_by_key(tmp_path: Path) -> None:
    draft = manifest(tmp_path, taps=["embed"], kernels="own", notes="n", provenance={"any": [1]})
    resolved = config.resolve(
        draft, environ(parse("--eagle3x-kernels", "sglang"), EAGLE3X_CONFIG='{"accept_alarm": 0}')
    )
    assert resolved.values == config.Options(taps=("embed",), kernels="sglang", accept_alarm=0)
    assert "taps = embed" in resolved.describe() and "--eagle3x-kernels" in resolved.describe()


def test_variable_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"accept_alarm_rounds": 5}', encoding="utf-8")
    assert config.resolve(None, {"EAGLE3X_CONFIG": f" {path} "}).values.accept_alarm_rounds == 5


def test_last_flag_wins_and_values_may_have_an_equals_sign() -> None:
    assert parse("--eagle3x-taps=embed", "--eagle3x-taps", "out@1") == {"taps": "out@1"}


def test_flags_do_not_touch_the_environment_until_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.FLAGS_ENVIRONMENT, raising=False)
    flags = parse("--eagle3x-kernels", "own")
    assert config.resolve(None).values.kernels == "auto"
    config.publish_flags(flags)
    assert config.resolve(None).values.kernels == "own"
    config.publish_flags({})  # the next server of this process has none
    assert config.resolve(None).values.kernels == "auto"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"taps": ["embed"],}',
        "[]",
        '["embed"]',
        "/no/such/file",
        '{"kernels": "own", "kernels": "auto"}',
        ".",
    ],
)
def test_unreadable_variable(text: str) -> None:
    (problem,) = refusal(EAGLE3X_CONFIG=text).problems
    assert problem.argument.startswith("EAGLE3X_CONFIG") and "json" in problem.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("taps", "embed"),
        ("taps", []),
        ("taps", [1]),
        ("taps", [""]),
        ("taps", {"embed": 1}),
        ("taps", None),
        ("kernels", "Own"),
        ("kernels", True),
        ("accept_alarm", "1.1"),
        ("accept_alarm", 0.5),
        ("accept_alarm", True),
        ("accept_alarm", float("nan")),
        ("accept_alarm", float("inf")),
        ("accept_alarm_rounds", 1.0),
        ("accept_alarm_rounds", 0),
        ("accept_alarm_rounds", False),
    ],
)
def test_wrong_value(name: str, value: object, tmp_path: Path) -> None:
    (problem,) = refusal(EAGLE3X_CONFIG=json.dumps({name: value})).problems
    assert (
        problem.argument == f"EAGLE3X_CONFIG: {name}" and problem.allowed == config.OPTIONS[name].rule.allowed
    )
    assert (
        refusal(manifest(tmp_path, **{name: value}))
        .problems[0]
        .argument.endswith(f"{config.MANIFEST}: {name}")
    )


@pytest.mark.parametrize(
    ("flag", "text"),
    [("taps", ","), ("taps", ""), ("kernels", "x"), ("accept_alarm", "high"), ("accept_alarm_rounds", "1.5")],
)
def test_wrong_flag_text(flag: str, text: str) -> None:
    option = config.OPTIONS[flag]
    with pytest.raises(RefusedError) as caught:
        config.resolve(None, environ(parse(f"{option.flag}={text}")))
    (problem,) = caught.value.problems
    assert problem.argument == option.flag and problem.given == repr(text)


def test_unknown_keys_with_a_suggestion(tmp_path: Path) -> None:
    assert "did you mean taps?" in str(refusal(EAGLE3X_CONFIG='{"tabs": ["embed"]}'))
    assert "did you mean provenance?" in str(refusal(manifest(tmp_path, provenence={})))
    # Keys of the manifest alone mean nothing in the environment.
    assert "unknown key 'schema'" in str(refusal(EAGLE3X_CONFIG='{"schema": 1}'))


def test_unknown_variable_with_a_suggestion() -> None:
    (problem,) = refusal(EAGLE3X_TAPS="embed").problems
    assert problem.argument == "EAGLE3X_TAPS" and "EAGLE3X_CONFIG" in problem.hint
    assert "did you mean EAGLE3X_STRICT?" in str(refusal(EAGLE3X_STRIKT="1"))


@pytest.mark.parametrize("schema", [2, "1", True, None, 1.0])
def test_manifest_schema(schema: object, tmp_path: Path) -> None:
    (problem,) = refusal(manifest(tmp_path, schema=schema)).problems
    assert problem.argument.endswith("schema")


def test_manifest_without_schema_and_unreadable(tmp_path: Path) -> None:
    path = tmp_path / config.MANIFEST
    path.write_text('{"taps": ["embed"]}', encoding="utf-8")
    assert "given nothing" in str(refusal(tmp_path))
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in str(refusal(tmp_path))
    path.unlink()
    path.mkdir()
    assert "cannot be read" in str(refusal(tmp_path))


def test_all_problems_at_once(tmp_path: Path) -> None:
    draft = manifest(tmp_path, schema=3, kernel="own", accept_alarm="x")
    flags = json.dumps({"accept_alarm_rounds": "-1"})
    error = refusal(draft, EAGLE3X_FLAGS=flags, EAGLE3X_CONFIG='{"tap": 1, "kernels": 2}', EAGLE3X_TEST="1")
    assert len(error.problems) == 7


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("true", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_strict_switch(text: str, on: bool) -> None:
    assert config.strict_builtin({"EAGLE3X_STRICT": text}) is on


@pytest.mark.parametrize("text", ["yes", "2", "on", " 1"])
def test_strict_switch_refuses_guesses(text: str) -> None:
    with pytest.raises(RefusedError, match="EAGLE3X_STRICT"):
        config.strict_builtin({"EAGLE3X_STRICT": text})


def test_help_shows_default_and_allowed_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for option in config.OPTIONS.values():
        assert option.flag in text and option.rule.help in text and f"Default: {option.default_text}" in text


def test_documentation_is_in_step() -> None:
    assert (REPOSITORY / "docs/options.md").read_text(encoding="utf-8") == config.markdown()
