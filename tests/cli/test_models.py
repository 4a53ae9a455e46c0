"""`kvkeep models` and `kvkeep pull`."""

import json
from pathlib import Path
from typing import Any

import pytest
from models.gguf_kinds import random_model
from models.gguf_writing import write
from tiny_gguf import tiny_llama, write_gguf

import kvkeep
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.model import Model


def test_a_pulled_model_is_listed_with_its_folder(invoke, smollm2_folder: Path) -> None:
    rows = json.loads(invoke("models", "--json").stdout)
    row = next(row for row in rows if row["name"] == "smollm2-135m-instruct")
    assert row["folder"] == str(smollm2_folder)
    assert row["bytes"] > 100e6
    assert str(smollm2_folder) in invoke("models").stdout


def test_a_model_that_was_not_pulled_is_listed_as_such(invoke, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    assert json.loads(invoke("models", "--json").stdout)[0]["folder"] is None
    assert "(not pulled)" in invoke("models").stdout


def test_pull_prints_the_models_folder(invoke, smollm2_folder: Path) -> None:
    assert invoke("pull").stdout == f"smollm2-135m-instruct is in {smollm2_folder}\n"


def test_pull_of_an_unknown_name_is_refused(invoke) -> None:
    result = invoke("pull", "no-such-model")
    assert result.exit_code == 2
    assert "no model 'no-such-model'" in result.stderr


def facts_of(invoke, *asked: object) -> dict[str, Any]:
    shown = invoke("models", "show", *asked, "--json")
    assert shown.exit_code == 0, shown.stderr
    return json.loads(shown.stdout)


def test_show_names_layers_of_each_kind(invoke, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    file = write(tmp_path / "m.gguf", "nemotron-h", random_model("nemotron-h"))
    assert "convert it with `kvkeep pull" in invoke("models", "show", file).stderr
    assert invoke("pull", file).exit_code == 0
    shown = invoke("models", "show", file)
    assert shown.exit_code == 0, shown.stderr
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert "2 with 2 KV heads of 32, attending to all tokens, without RoPE" in lines
    assert "3 with a state, 0.1 MB for each session" in lines
    assert "3 with an MLP alone" in lines
    assert "trained      to 1,048,576 tokens; no RoPE" in lines


def test_show_agrees_with_the_loaded_model(invoke, smollm2: Model) -> None:
    facts, tensors = facts_of(invoke), smollm2.decoder.weights
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert facts["weight_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    held = [*smollm2.decoder.tensors.values(), *smollm2.decoder.packed.values()]
    assert facts["weight_bytes_held"] == sum(each.nbytes for each in held)
    for bits, name in ((None, "16 bits"), ("8", "8 bits"), ("8/4", "8/4 bits"), ("4", "4 bits")):
        cell = smollm2.session(policy="full", kv_bits=bits).cache.layout.cell_bytes
        assert facts["thousand_cells"][name] == 1000 * cell
        assert bits is not None or facts["full_cells"] == smollm2.spec.max_positions * cell
    executor = smollm2.decoder.executor
    if isinstance(executor, CompiledExecutor):
        assert facts["bytes_per_token"] == sum(executor.matrix_bytes().values())
        assert facts["formats"] == {"Q4_1": 210, "Q8_0": 1}
        assert facts["decode"].startswith(f"compiled kernels for {selected_set().name}")
        assert facts["attention"] == "compiled kernels"
    else:
        assert facts["decode"].startswith("torch: the compiled kernels")


def test_show_names_the_executors_and_the_reason(invoke, tiny_folder: Path) -> None:
    shown = invoke("models", "show", tiny_folder, "--dtype", "float32").stdout
    assert "by torch: the compiled kernels support bfloat16, not float32" in shown
    assert "attention by torch" in shown
    cells = facts_of(invoke, tiny_folder, "--dtype", "float32")["thousand_cells"]
    assert list(cells) == ["32 bits", "8 bits", "8/4 bits", "4 bits"]


def test_show_names_the_attention_of_a_head_size_without_kernels(
    invoke, hybrid_folder: Path
) -> None:
    facts = facts_of(invoke, hybrid_folder)
    assert (facts["head_dim"], facts["attention"]) == (16, "torch")


def test_show_has_the_bytes_of_states_and_checkpoints(invoke, hybrid_folder: Path) -> None:
    asked = (hybrid_folder, "--dtype", "float32")
    shown, facts = invoke("models", "show", *asked).stdout, facts_of(invoke, *asked)
    session = kvkeep.load_model(hybrid_folder, dtype="float32").session(512, prefill_step=64)
    session.feed(list(range(3, 200)))
    assert session.memory_use.states == facts["state_bytes"] == facts["checkpoint_bytes"] > 0
    assert "--checkpoints bounds those of a session" in shown
    assert "MB of states" in shown
    assert " MB a checkpoint" in invoke("doctor", *asked).stdout


def test_unsupported_packed_weights_are_refused(invoke, tiny_folder: Path) -> None:
    asked = ("models", "show", tiny_folder, "--dtype", "float32", "--weights", "int4")
    refused = invoke(*asked)
    assert refused.exit_code == 2
    assert 'weights="int4" needs compiled kernels, which support bfloat16' in refused.stderr


def test_show_does_not_fetch_a_model(
    invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    refused = invoke("models", "show", "smollm2-135m-instruct")
    assert refused.exit_code == 2
    assert "fetch it with `kvkeep pull smollm2-135m-instruct`" in refused.stderr
    assert not list(tmp_path.iterdir())


def test_a_converted_model_is_exported(
    invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    file, to = write_gguf(tmp_path / "m.gguf", tiny_llama()), tmp_path / "a" / "out"
    done = invoke("models", "export", file, to, "--quiet")
    assert (done.exit_code, done.stdout) == (0, f"{to}\n")
    assert (to / "model.safetensors").exists()
    refused = invoke("models", "export", file, to)
    assert refused.exit_code == 2
    assert f"{to} already exists" in refused.stderr


def test_json_before_a_command_is_refused_with_its_place(invoke) -> None:
    refused = invoke("models", "--json", "list")
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert "kvkeep models list --json" in refused.stderr
