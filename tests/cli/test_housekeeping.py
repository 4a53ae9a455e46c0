"""Listing and removal of prefixes, models and disk use; nothing else is removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import Invoke
from lossy_basis import random_basis
from topics import topic_text

from kvkeep import load_model
from kvkeep.models.hub.library import (
    find_model,
    packed_folder,
    pulled_models,
    store_model,
    unpacked_folder,
)
from kvkeep.storage.lossy.basis import add_basis
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.prefixes.inventory import BLOCK_FORMAT, BLOCK_KIND, stored_prompts
from kvkeep.storage.snapshots.container import read_container, write_container


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def listed(invoke: Invoke, *command: str) -> list[dict[str, object]]:
    found = json.loads(invoke(*command, "--json").stdout)
    assert isinstance(found, list)
    return found


def test_prompts_are_listed_with_their_size_and_removed(
    invoke: Invoke, tiny: list[str], own_home: Path
) -> None:
    """Of two prompts with a common prefix, the prefix counts once."""
    text = topic_text()
    assert "the prefix cache is empty" in invoke("prefixes", "list").stderr
    for rest in ("", text[4000:9000]):
        asked = ("-p", text[:2000] + rest, "-n", 1, "--prefix-cache", *tiny)
        assert invoke("generate", *asked).exit_code == 0
    blocks = list((own_home / "prefixes").glob("*.kvblock"))
    found = listed(invoke, "prefixes", "list")
    assert sum(int(str(each["bytes"])) for each in found) == sum(b.stat().st_size for b in blocks)
    assert max(int(str(each["tokens"])) for each in found) >= 1024
    shown = invoke("prefixes", "list").stdout
    assert shown.count("\n") == 1 + len(found)
    texts = invoke("prefixes", "list", "--text", "-m", tiny[1]).stdout
    assert "TEXT" not in texts, "in float32 it is another model's"
    said = invoke("prefixes", "list", "--text", "-m", tiny[1]).stderr
    assert f"no prompt of {tiny[1]} in bfloat16, but 1 other" in said
    prompts = stored_prompts(own_home / "prefixes")
    keep_bytes = min(each.nbytes for each in prompts)
    assert "removed" in invoke("prefixes", "gc", "--max-bytes", keep_bytes).stdout
    assert sum(each.nbytes for each in stored_prompts(own_home / "prefixes")) <= keep_bytes
    assert ", 0.0 MB left" in invoke("prefixes", "clear").stdout
    assert stored_prompts(own_home / "prefixes") == []
    assert invoke("prefixes", "gc", "--max-bytes", "some").exit_code == 2


def test_the_text_of_prompts_is_decoded_by_their_model(
    invoke: Invoke, tiny_folder: Path, own_home: Path
) -> None:
    asked = ("-p", "The sea is wide. " * 300, "-n", 1, "--prefix-cache", "-m", tiny_folder)
    assert invoke("generate", *asked).exit_code == 0
    assert "The sea is wide. The" in invoke("prefixes", "list", "--text", "-m", tiny_folder).stdout


@pytest.mark.parametrize("step", [512, 128, 64, 1024])
def test_prompts_of_batches_are_found(
    invoke: Invoke, tiny: list[str], own_home: Path, tmp_path: Path, step: int
) -> None:
    """For each step size that is a power of two, 512 by default."""
    text, source = "The sea is wide. " * 300, tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": text}), encoding="utf-8")
    options = () if step == 512 else ("--prefill-step", step)
    asked = ("batch", source, "-o", tmp_path / "out", "-n", 1, "--prefix-cache", *tiny, *options)
    assert invoke(*asked).exit_code == 0
    (prompt,) = listed(invoke, "prefixes", "list", "--text", *tiny)
    assert str(prompt["text"]).startswith("The sea is wide. The")
    counts = json.loads(invoke("why", "-p", text, "--json", *tiny).stdout)
    assert counts["stored_tokens"] == prompt["tokens"] >= 1024


def test_prompts_that_a_codec_rounded_are_listed_as_such(
    invoke: Invoke, tiny: list[str], tiny_folder: Path, own_home: Path, tmp_path: Path
) -> None:
    model = load_model(tiny_folder)
    basis = add_basis(random_basis(model)).stem
    text, folder = "The sea is wide. " * 300, own_home / "prefixes"
    asked = ("generate", "-p", text, "-n", 1, "--prefix-cache", "-m", tiny_folder)
    assert invoke(*asked).exit_code == 0
    assert "ROUNDED" not in invoke("prefixes", "list").stdout
    assert invoke(*asked, "--codec", "smaller").exit_code == 0
    listing = ("prefixes", "list", "--text", "-m", tiny_folder)
    found = {each["rounded"]: each for each in listed(invoke, *listing)}
    assert set(found) == {"", "smaller"}, "prompts of the model, rounded or not"
    assert found["smaller"]["text"] == found[""]["text"]
    titles, *lines = invoke(*listing).stdout.splitlines()
    assert "  ROUNDED  TEXT" in titles
    assert sorted("smaller  The sea" in line for line in lines) == [False, True]
    objects, key = open_object_store(tmp_path / "objects"), str(found["smaller"]["model"])
    first = next(folder.glob(f"{key}-*.kvblock"))
    objects.put(f"prefixes/0/{key}/{first.stem.partition('-')[2]}.kvblock", first.read_bytes())
    shared = listed(invoke, "prefixes", "list", "--store", (tmp_path / "objects").as_uri())
    assert [each["rounded"] for each in shared] == ["smaller"]
    container = read_container(first, BLOCK_KIND, BLOCK_FORMAT)
    assert container.document["basis"] == basis
    for forged in ({}, {"rounded": "\x1b[2J"}, {"rounded": 3}):
        document = {"start": 0, "key": container.document["key"], **forged}
        write_container(first, BLOCK_KIND, BLOCK_FORMAT, document, container.tensors)
        assert {each["rounded"] for each in listed(invoke, "prefixes", "list")} == {"", "unknown"}
    first.write_bytes(first.read_bytes()[:100])
    codecs = {each["rounded"] for each in listed(invoke, "prefixes", "list")}
    assert codecs == {"", "smaller"}, "as its next block says"


def test_why_finds_prompts_that_a_codec_rounded(
    invoke: Invoke, tiny: list[str], tiny_folder: Path, own_home: Path
) -> None:
    text = "The sea is wide. " * 300
    asked = ("generate", "-n", 1, "--prefix-cache", *tiny, "-p")
    explain = ("why", *tiny, "-p", text)
    assert json.loads(invoke(*explain, "--json").stdout)["stored_tokens"] == 0
    add_basis(random_basis(load_model(tiny_folder, dtype="float32")))
    assert invoke(*asked, text, "--codec", "small").exit_code == 0
    found = json.loads(invoke(*explain, "--json").stdout)
    assert (found["stored_tokens"] >= 1024, found["rounded"]) == (True, "small")
    assert "rounded: commands reuse them with --codec small\n" in invoke(*explain).stdout
    assert invoke(*asked, text[:2000]).exit_code == 0, "fewer exact blocks"
    assert json.loads(invoke(*explain, "--json").stdout)["rounded"] == "small"
    assert invoke(*asked, text).exit_code == 0
    assert json.loads(invoke(*explain, "--json").stdout) == {**found, "rounded": ""}


def test_checkpoints_of_prompts_are_listed_explained_and_verified(
    invoke: Invoke, hybrid_folder: Path, own_home: Path
) -> None:
    text, model = "The sea is wide. " * 300, ("-m", hybrid_folder, "--dtype", "float32")
    asked = ("generate", "-p", text, "-n", 1, "--prefix-cache", *model)
    assert invoke(*asked).exit_code == 0
    (prompt,) = listed(invoke, "prefixes", "list")
    ends = prompt["checkpoints"]
    assert isinstance(ends, list)
    assert ends[-1] == prompt["tokens"]
    assert f"{ends[-2]:,}, {ends[-1]:,}\n" in invoke("prefixes", "list").stdout
    assert f"reused {ends[-1]} tokens" in invoke(*asked).stderr
    explained = invoke("why", "-p", text, *model).stdout
    assert "checkpoint" not in explained, "there is one after the last stored token"
    assert "none damaged" in invoke("prefixes", "verify").stderr
    for path in (own_home / "prefixes").glob("*.kvcheckpoint"):
        path.write_bytes(path.read_bytes()[:-9])
    verified = invoke("prefixes", "verify")
    assert verified.exit_code == 2
    assert verified.stdout.count("BAD") == len(ends)
    assert "checkpoint that this model needs is missing" in invoke("why", "-p", text, *model).stdout
    found = json.loads(invoke("why", "-p", text, "--json", *model).stdout)
    assert (found["stored_tokens"], found["evaluated_from"]) == (ends[-1], 0)
    assert f"reused 0 tokens, {ends[-1]} more have no checkpoint" in invoke(*asked).stderr


def test_a_block_without_its_predecessors_is_not_a_prompt(tmp_path: Path) -> None:
    for parent, key in (("root", "a"), ("a", "b"), ("a", "c"), ("lost", "d"), ("d", "e")):
        (tmp_path / f"{parent}-{key}.kvblock").write_bytes(b"x" * 10)
    (tmp_path / "lock").touch()
    found = stored_prompts(tmp_path)
    names = [[Path(block.location).stem for block in each.blocks] for each in found]
    assert sorted(names) == [["lost-d", "d-e"], ["root-a", "a-b"], ["root-a", "a-c"]]
    assert sum(each.nbytes for each in found) == 50
    assert {each.model_digest for each in found} == {"root", "lost"}
    assert stored_prompts(tmp_path / "none") == []


def made(slug: str, name: str, elsewhere: Path | None = None) -> None:
    def fill(folder: Path) -> Path | None:
        ((elsewhere or folder) / "model.safetensors").write_bytes(b"w" * 1000)
        return elsewhere

    store_model(slug, name, f"from {name}", fill, progress=False)


def test_a_model_is_removed_with_its_derived_files(
    invoke: Invoke, own_home: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    made("one", "one")
    made("one-2", "one-2")
    made("far", "owner/far", hub)
    packed = {model.slug: packed_folder(model.path) for model in pulled_models()}
    unpacked = unpacked_folder(find_model("one").path)
    for folder in (packed["one"], unpacked / "77-88", packed["one-2"]):
        folder.mkdir(parents=True)
        (folder / "int4.safetensors").write_bytes(b"p" * 500)
    refused = invoke("models", "rm", "one", "none")
    assert refused.exit_code == 2
    assert "on this machine; there is: owner/far, one, one-2" in refused.stderr
    assert len(pulled_models()) == 3
    disk = {row["kind"]: row["bytes"] for row in listed(invoke, "disk")}
    assert disk["packed"] == 1000
    assert disk["unpacked"] == 500
    assert invoke("models", "rm", "one").stdout.startswith("removed one, 0.0 MB")
    assert {model.slug for model in pulled_models()} == {"far", "one-2"}
    assert list((own_home / "packed").iterdir()) == [packed["one-2"]]
    assert list((own_home / "unpacked").iterdir()) == []
    removed = invoke("models", "rm", "owner/far", "one-2")
    assert f"removed owner/far, 0.0 MB; {hub} remains\n" in removed.stdout
    assert (hub / "model.safetensors").exists(), "the hub's cache is not ours"
    assert find_model("far") is None
    assert list((own_home / "models").iterdir()) == []


def test_packed_weights_of_a_users_folder_are_removed(
    invoke: Invoke, own_home: Path, tmp_path: Path
) -> None:
    """Also if the folder is gone. Those of a folder of the same name elsewhere stay."""
    mine, gone, other = (tmp_path / name / "model" for name in ("a", "gone", "other"))
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    for folder in (mine, gone, other):
        packed_folder(folder).mkdir(parents=True)
        (packed_folder(folder) / "int8.safetensors").write_bytes(b"p" * 500_000)
    removed = invoke("models", "rm", mine, gone)
    assert removed.stdout == (
        f"removed packed weights of {mine}, 0.5 MB; {mine} remains\n"
        f"removed packed weights of {gone}, 0.5 MB\n"
    )
    assert list((own_home / "packed").iterdir()) == [packed_folder(other)]
    assert (mine / "config.json").exists()
    assert invoke("models", "rm", mine).exit_code == 2


def test_unpacked_weights_of_a_namesake_stay(
    invoke: Invoke, own_home: Path, tmp_path: Path
) -> None:
    made("one", "one")
    mine, pulled = tmp_path / "one", pulled_models()[0].path
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    for folder in (packed_folder(mine), unpacked_folder(mine), unpacked_folder(pulled)):
        (folder / "1-2").mkdir(parents=True)
    assert invoke("models", "rm", mine).exit_code == 0
    assert list((own_home / "unpacked").iterdir()) == [unpacked_folder(pulled)]


def test_weights_that_were_derived_from_an_earlier_state_are_removed(
    own_home: Path, tmp_path: Path
) -> None:
    """A changed GGUF file is converted to another folder; a repository has a newer snapshot."""
    commits = [tmp_path / name for name in ("old", "new")]
    slugs = ["file-1", "file-2"]
    for slug, commit in zip(slugs, commits, strict=True):
        commit.mkdir()
        converted = store_model(slug, "file", "file", lambda _: None, progress=False)
        snapshot = store_model("hub", "hub", "hub", lambda _, to=commit: to, False, refresh=True)
        packed = [packed_folder(converted), packed_folder(snapshot)]
        for folder in (*packed, unpacked_folder(converted)):
            folder.mkdir(parents=True)
    assert sorted((own_home / "packed").iterdir()) == sorted(packed)
    assert list((own_home / "unpacked").iterdir()) == [unpacked_folder(converted)]


def test_disk_use_by_kind_adds_up(invoke: Invoke, own_home: Path, tiny: list[str]) -> None:
    invoke("generate", "-p", "The sea " * 400, "-n", 1, "--prefix-cache", "--session", "s", *tiny)
    rows = listed(invoke, "disk")
    sizes = {row["kind"]: int(str(row["bytes"])) for row in rows}
    assert sizes["sessions"] == (own_home / "sessions" / "s.kvkeep").stat().st_size
    assert sizes["prefixes"] > 0
    whole = sum(path.stat().st_size for path in own_home.rglob("*") if path.is_file())
    assert sum(sizes.values()) == whole
    assert "kvkeep prefixes gc" in invoke("disk").stdout


def completed(*words: str) -> list[str]:
    said = subprocess.run(
        [sys.executable, "-c", "from kvkeep.cli.start import run; run()"],
        env=os.environ
        | {
            "COMP_WORDS": " ".join(("kvkeep", *words)),
            "COMP_CWORD": str(len(words)),
            "_KVKEEP_COMPLETE": "bash_complete",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.partition(",")[2] for line in said.stdout.splitlines()]


def test_a_shell_completes_commands_options_and_names(
    invoke: Invoke, own_home: Path, tiny: list[str]
) -> None:
    for name in ("alpha", "beta"):
        assert invoke("generate", "-p", "x", "-n", 1, "--session", name, *tiny).exit_code == 0
    made("one", "one")
    assert completed("mod") == ["models"]
    assert completed("sessions", "show", "al") == ["alpha"]
    assert completed("chat", "--session", "") == ["alpha", "beta"]
    assert "--system" in completed("chat", "--sy")
    assert completed("models", "rm", "o") == ["one"]
    for shell in ("bash", "zsh", "fish"):
        script = invoke("completion", shell)
        assert script.exit_code == 0
        assert "_KVKEEP_COMPLETE" in script.stdout
    assert invoke("completion", "tcsh").exit_code == 2


def test_lists_do_not_import_torch(invoke: Invoke, own_home: Path, tiny: list[str]) -> None:
    asked = ("-p", "The sea " * 400, "-n", 1, "--session", "s", "--prefix-cache", *tiny)
    assert invoke("generate", *asked).exit_code == 0
    lists = [["sessions", "list"], ["prefixes", "list"], ["models"], ["disk"]]
    program = f"""
import sys
from kvkeep.cli.main import main
for arguments in {lists}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, arguments
found = {{"torch", "numpy", "tokenizers", "safetensors"}} & sys.modules.keys()
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert b"tiny" in done.stdout
