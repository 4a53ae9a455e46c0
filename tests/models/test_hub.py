"""Models from repositories of the Hugging Face hub."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from tiny_gguf import tiny_llama, write_gguf

from kvkeep import load_model
from kvkeep.errors import BadModelFile, ModelNotFound, UnsupportedModel
from kvkeep.models.hub.library import find_model, pulled_models, remove_model
from kvkeep.models.hub.repository import parse_hub_name
from kvkeep.models.hub.source import local_folder, resolve

INTERRUPTED = """
import os, sys
from kvkeep.models.hub.source import resolve

def interrupt(event, arguments):
    if event == "os.rename" and os.fsdecode(arguments[1]).endswith("packed.safetensors"):
        raise KeyboardInterrupt

sys.addaudithook(interrupt)
resolve("owner/tiny:Q4_0", False)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubServer(tmp_path / "hub") as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}.ENDPOINT", server.url)
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_llama(num_hidden_layers=1))


def publish(hub: HubServer, gguf: Path, *names: str, repository: str = "owner/tiny") -> None:
    for name in names:
        path = hub.folder / repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(gguf, path)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("owner/name", ("owner/name", None)),
        ("owner/name:latest", ("owner/name", None)),
        ("owner/name:q4_k_m", ("owner/name", "Q4_K_M")),
        ("hf.co/owner/name:UD-Q4_K_XL", ("owner/name", "UD-Q4_K_XL")),
        ("huggingface.co/owner/name.v2", ("owner/name.v2", None)),
        ("https://huggingface.co/owner/name/", ("owner/name", None)),
        ("owner/name:m.Q4_0.gguf", ("owner/name", "M.Q4_0")),
        ("folder/missing.gguf", None),
        ("https://example.com/name", None),
        ("./owner/name", None),
        ("owner/name:", None),
        ("name:Q4_0", None),
    ],
)
def test_spellings_of_hub_names(name: str, parsed: tuple[str, str | None] | None) -> None:
    assert parse_hub_name(name) == parsed


@pytest.mark.parametrize("name", ["owner/tiny:q4_k_m", "https://hf.co/owner/tiny:Q4_K_M"])
def test_gguf_file_of_a_quantisation_is_pulled_once(hub: HubServer, gguf: Path, name: str) -> None:
    publish(hub, gguf, "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-Q8_0.gguf")
    folder = resolve(name, progress=False)
    assert folder.name == "owner--tiny--Q4_K_M"
    assert hub.downloads == [("tiny-Q4_K_M.gguf", 0)]
    assert resolve("owner/tiny:Q4_K_M", progress=False) == folder
    assert local_folder(name) == folder
    assert load_model(name).folder == folder
    assert [model.name for model in pulled_models()] == ["owner/tiny:Q4_K_M"]
    assert len(hub.downloads) == 1
    assert list((folder.parents[1] / "downloads").iterdir()) == []


@pytest.mark.parametrize(
    ("names", "pulled", "quantisation"),
    [
        (["m-Q2_K.gguf", "m.Q4_K_M.gguf", "m-Q8_0.gguf"], "m.Q4_K_M.gguf", "Q4_K_M"),
        (["m-Q2_K.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf", "Q8_0"),
        (["mmproj-m-Q8_0.gguf", "m-F16.gguf"], "m-F16.gguf", "F16"),
        (["m.gguf"], "m.gguf", "M"),
    ],
)
def test_quantisation_of_a_repository_named_without_one(
    hub: HubServer, gguf: Path, names: list[str], pulled: str, quantisation: str
) -> None:
    publish(hub, gguf, *names)
    folder = resolve("owner/tiny", progress=False)
    assert hub.downloads == [(pulled, 0)]
    hub.shutdown()
    assert resolve("owner/tiny", progress=False) == local_folder("hf.co/owner/tiny") == folder
    assert resolve(f"owner/tiny:{quantisation}", progress=False) == folder


def test_repository_without_a_preferred_quantisation_lists_its_own(
    hub: HubServer, gguf: Path
) -> None:
    publish(hub, gguf, "m-Q2_K.gguf", "m-IQ3_XXS.gguf")
    with pytest.raises(ModelNotFound, match=r"^add a quantisation .*Q2_K \(0\.0 GB\)"):
        resolve("owner/tiny", progress=False)
    assert hub.downloads == []


def test_safetensors_are_preferred_without_a_quantisation(
    hub: HubServer, gguf: Path, tiny_folder: Path
) -> None:
    shutil.copytree(tiny_folder, hub.folder / "owner" / "tiny")
    publish(hub, gguf, "tiny-Q4_K_M.gguf")
    folder = resolve("owner/tiny", progress=False)
    assert (folder / "model.safetensors").exists()
    assert not any(name.endswith(".gguf") for name, _ in hub.downloads)
    assert resolve("owner/tiny:Q4_K_M", progress=False).name == "owner--tiny--Q4_K_M"


@pytest.mark.parametrize("subfolder", ["", "Q4_K_M/"])
def test_all_parts_of_a_split_model_are_pulled(
    hub: HubServer, tmp_path: Path, subfolder: str
) -> None:
    target = hub.folder / "owner" / "tiny" / subfolder
    target.mkdir(parents=True)
    write_gguf(target / "m-Q4_K_M.gguf", tiny_llama(num_hidden_layers=1), in_a_part=5)
    folder = resolve("owner/tiny:Q4_K_M", progress=False)
    parts = sorted(path.name for path in target.iterdir())
    assert len(parts) == 3
    assert [Path(name).name for name, _ in hub.downloads] == parts
    assert load_model("owner/tiny:Q4_K_M").folder == folder


def test_quantisation_may_be_the_folder_or_part_of_a_longer_name(
    hub: HubServer, gguf: Path
) -> None:
    publish(hub, gguf, "Q6_K/m.gguf", "m-UD-Q4_K_XL.gguf")
    resolve("owner/tiny:Q6_K", progress=False)
    resolve("owner/tiny:Q4_K_XL", progress=False)
    assert [name for name, _ in hub.downloads] == ["Q6_K/m.gguf", "m-UD-Q4_K_XL.gguf"]


def test_one_of_several_files_of_a_quantisation_is_chosen_by_its_name(
    hub: HubServer, gguf: Path
) -> None:
    publish(hub, gguf, "a-Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(ModelNotFound, match=r"^name one of .*owner/tiny:b-Q4_0\.gguf"):
        resolve("owner/tiny:Q4_0", progress=False)
    resolve("owner/tiny:b-Q4_0.gguf", progress=False)
    assert hub.downloads == [("b-Q4_0.gguf", 0)]


def test_wrong_quantisation_lists_those_there_are_and_the_nearest(
    hub: HubServer, gguf: Path
) -> None:
    publish(hub, gguf, "m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    message = r"no Q4_K_L; the nearest is owner/tiny:Q4_K_M\. It has Q2_K \(0\.0 GB\), Q4_K_M"
    with pytest.raises(ModelNotFound, match=message):
        resolve("owner/tiny:Q4_K_L", progress=False)
    assert pulled_models() == []


def test_quantisation_of_a_repository_without_gguf_files(hub: HubServer, tiny_folder: Path) -> None:
    shutil.copytree(tiny_folder, hub.folder / "owner" / "tiny")
    with pytest.raises(ModelNotFound, match=r"^leave out :Q4_K_M, owner/tiny has no GGUF files"):
        resolve("owner/tiny:Q4_K_M", progress=False)


@pytest.mark.parametrize("name", ["owner/gone", "owner/gone:Q4_K_M", "owner/go..ne"])
def test_unknown_repository_says_to_check_the_name(hub: HubServer, name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"^check the name: .*'owner/go.*hf auth login"):
        resolve(name, progress=False)
    assert pulled_models() == []


@pytest.mark.parametrize("are_disabled", [True, False])
def test_progress_bars_of_other_downloads_stay_as_they_were(
    hub: HubServer, are_disabled: bool
) -> None:
    from huggingface_hub import utils

    (utils.disable_progress_bars if are_disabled else utils.enable_progress_bars)()
    try:
        for progress in (True, False):
            with pytest.raises(ModelNotFound):
                resolve("owner/nothing", progress=progress)
            assert utils.are_progress_bars_disabled() == are_disabled
    finally:
        utils.enable_progress_bars()


@pytest.mark.parametrize("name", ["owner/tiny", "owner/tiny:Q4_K_M"])
def test_unreachable_hub_says_what_to_do_instead(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    message = (
        r"^the Hugging Face hub cannot be reached .* Pull 'owner/tiny' again when .* NAME PATH`"
    )
    with pytest.raises(ModelNotFound, match=message):
        resolve(name, progress=False)


def test_folder_in_the_cache_of_the_hub_is_found_offline(
    hub: HubServer, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, hub.folder / "owner" / "tiny")
    folder = resolve("owner/tiny", progress=False)
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "other"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve("owner/tiny", progress=False) == folder


def test_interrupted_download_resumes_where_it_stopped(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is cut in the second of three parts."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    target = hub.folder / "owner" / "tiny"
    target.mkdir(parents=True)
    write_gguf(target / "m-Q4_0.gguf", tiny_llama(num_hidden_layers=1), in_a_part=5)
    parts = sorted(target.iterdir())
    hub.cut_after = parts[0].stat().st_size + 100_000
    with pytest.raises(ModelNotFound, match=r"Pull 'owner/tiny' again .*downloads resume"):
        resolve("owner/tiny:Q4_0", progress=False)
    assert pulled_models() == []
    hub.cut_after = None
    hub.downloads.clear()
    resolve("owner/tiny:Q4_0", progress=False)
    assert hub.downloads == [(parts[1].name, 100_000), (parts[2].name, 0)]


def test_complete_files_of_a_folder_are_not_fetched_again(
    hub: HubServer, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, hub.folder / "owner" / "tiny")
    hub.cut_after = (tiny_folder / "tokenizer.json").stat().st_size
    with pytest.raises(ModelNotFound):
        resolve("owner/tiny", progress=False)
    complete = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    hub.cut_after = None
    hub.downloads.clear()
    folder = resolve("owner/tiny", progress=False)
    assert (folder / "model.safetensors").read_bytes()
    assert complete.isdisjoint(name for name, _ in hub.downloads)


def test_damaged_download_is_removed(hub: HubServer, gguf: Path, tmp_path: Path) -> None:
    publish(hub, gguf, "m-Q4_0.gguf")
    hub.cut_after = 0
    with pytest.raises(ModelNotFound, match="hub cannot be reached"):
        resolve("owner/tiny:Q4_0", progress=False)
    (download,) = (tmp_path / "home" / "downloads").rglob("*.gguf")
    download.write_bytes(b"other content")
    hub.cut_after = None
    with pytest.raises(BadModelFile, match=r"m-Q4_0\.gguf has sha256"):
        resolve("owner/tiny:Q4_0", progress=False)
    resolve("owner/tiny:Q4_0", progress=False)
    assert find_model("owner--tiny--Q4_0") is not None


def test_unsupported_architecture_is_refused_before_the_download(
    hub: HubServer, gguf: Path
) -> None:
    publish(hub, gguf, "m-Q4_0.gguf")
    hub.architecture = "mamba"
    with pytest.raises(UnsupportedModel, match="the GGUF architecture 'mamba' is not supported"):
        resolve("owner/tiny:Q4_0", progress=False)
    assert hub.downloads == []


def test_complete_download_is_not_fetched_again_after_an_interrupted_conversion(
    hub: HubServer, tmp_path: Path
) -> None:
    target = hub.folder / "owner" / "tiny"
    target.mkdir(parents=True)
    write_gguf(target / "m-Q4_0.gguf", tiny_llama(num_hidden_layers=1), in_a_part=5)
    variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
    child = subprocess.run([sys.executable, "-c", INTERRUPTED], env=variables, check=False)
    assert child.returncode == -signal.SIGINT
    assert len(hub.downloads) == 3
    resolve("owner/tiny:Q4_0", progress=False)
    assert len(hub.downloads) == 3
    assert list((tmp_path / "home" / "downloads").iterdir()) == []


def test_download_that_cannot_be_converted_is_removed(hub: HubServer, tmp_path: Path) -> None:
    target = hub.folder / "owner" / "tiny"
    target.mkdir(parents=True)
    write_gguf(target / "m-Q4_0.gguf", tiny_llama(num_hidden_layers=1), "clip")
    with pytest.raises(UnsupportedModel, match="projector"):
        resolve("owner/tiny:Q4_0", progress=False)
    assert hub.downloads == [("m-Q4_0.gguf", 0)]
    assert list((tmp_path / "home" / "downloads").iterdir()) == []


def test_file_beyond_the_limit_of_downloads_is_refused_before_the_download(
    hub: HubServer, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", 1000)
    publish(hub, gguf, "m-Q4_0.gguf")
    message = r"files of up to .* run `hf download owner/tiny m-Q4_0\.gguf --local-dir \.`"
    with pytest.raises(ModelNotFound, match=message):
        resolve("owner/tiny:Q4_0", progress=False)
    assert hub.downloads == []


def publish_folder(hub: HubServer, folder: Path, **config: object) -> Path:
    target = hub.folder / "owner" / "tiny"
    shutil.copytree(folder, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, **config}))
    return target


UNSUPPORTED = {"architectures": ["Mamba2ForCausalLM"]}


@pytest.mark.parametrize(
    "config", [UNSUPPORTED, {"quantization_config": {"quant_method": "fp8"}}], ids=["mamba", "fp8"]
)
def test_unsupported_folder_is_refused_before_its_weights_are_fetched(
    hub: HubServer, tiny_folder: Path, config: dict[str, object]
) -> None:
    publish_folder(hub, tiny_folder, **config)
    with pytest.raises(UnsupportedModel):
        resolve("owner/tiny", progress=False, refresh_hub=True)
    assert {name for name, _ in hub.downloads} >= {"config.json", "tokenizer.json"}
    assert "model.safetensors" not in {name for name, _ in hub.downloads}
    assert pulled_models() == []


def test_folder_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    hub: HubServer, tiny_folder: Path
) -> None:
    (publish_folder(hub, tiny_folder) / "tokenizer.json").unlink()
    with pytest.raises(BadModelFile, match=r"no tokenizer\.json, and kvkeep reads no other"):
        resolve("owner/tiny", progress=False)
    assert "model.safetensors" not in {name for name, _ in hub.downloads}


def test_unsupported_folder_is_fetched_for_transformers(hub: HubServer, tiny_folder: Path) -> None:
    publish_folder(hub, tiny_folder, **UNSUPPORTED)
    folder = resolve("owner/tiny", progress=False, any_architecture=True)
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_only_the_weights_that_belong_to_the_folder_are_fetched(
    hub: HubServer, tiny_folder: Path, is_sharded: bool
) -> None:
    target = publish_folder(hub, tiny_folder)
    if is_sharded:
        (target / "model.safetensors").unlink()
        tiny_llama(num_hidden_layers=1).save_pretrained(target, max_shard_size="1MB")
    weights = {path.name for path in target.glob("*.safetensors")}
    assert (len(weights) > 1) == is_sharded
    for other in ("consolidated.safetensors", "original/model.safetensors", "onnx/model.onnx"):
        (target / other).parent.mkdir(exist_ok=True)
        (target / other).write_bytes(b"other")
    resolve("owner/tiny", progress=False)
    fetched = {name for name, _ in hub.downloads}
    assert {name for name in fetched if not name.endswith((".json", ".jinja"))} == weights


def test_folder_without_safetensors_is_not_a_model(hub: HubServer, tiny_folder: Path) -> None:
    target = publish_folder(hub, tiny_folder)
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors in 'owner/tiny'.*GGUF"):
        resolve("owner/tiny", progress=False)
    assert pulled_models() == []


def test_model_is_listed_and_removed_once_with_its_repositorys_name(
    hub: HubServer, gguf: Path, tmp_path: Path
) -> None:
    publish(hub, gguf, "m-Q4_0.gguf")
    folder = resolve("owner/tiny", progress=False)
    (model,) = pulled_models()
    assert (model.name, model.path) == ("owner/tiny:Q4_0", folder)
    assert remove_model(model, progress=False) > gguf.stat().st_size // 2
    assert list((tmp_path / "home" / "models").iterdir()) == []
    assert local_folder("owner/tiny") is None
