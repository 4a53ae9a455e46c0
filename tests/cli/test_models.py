"""`kvkeep models` and `kvkeep pull` say what is here and where."""

import json
from pathlib import Path


def test_a_pulled_model_is_listed_with_its_folder(invoke, smollm2_folder: Path) -> None:
    rows = json.loads(invoke("models", "--json").stdout)
    row = next(row for row in rows if row["name"] == "smollm2-135m-instruct")
    assert row["folder"] == str(smollm2_folder)
    assert row["bytes"] > 100e6
    assert str(smollm2_folder) in invoke("models").stdout


def test_a_model_that_is_not_here_is_listed_as_such(invoke, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    assert json.loads(invoke("models", "--json").stdout)[0]["folder"] is None
    assert "(not pulled)" in invoke("models").stdout


def test_pull_says_where_the_model_is(invoke, smollm2_folder: Path) -> None:
    assert invoke("pull").stdout == f"smollm2-135m-instruct is in {smollm2_folder}\n"


def test_pull_of_nothing_known_is_refused(invoke) -> None:
    result = invoke("pull", "no-such-model")
    assert result.exit_code == 2
    assert "no model 'no-such-model'" in result.stderr
