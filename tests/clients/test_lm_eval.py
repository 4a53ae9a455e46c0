"""lm-eval over the server gives what it gives with its own backend for transformers.

Needs a Python environment of its own, made by `python -m venv ENV` and
`ENV/bin/pip install torch==2.13.0 "lm_eval[api,hf]"`; KVKEEP_LM_EVAL_PYTHON is its `bin/python`.
"""

import json
import os
import random
import re
import subprocess
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch
from server.conftest import running_server

from kvkeep.model import Model
from kvkeep.models.weights.export import export

PYTHON = os.environ.get("KVKEEP_LM_EVAL_PYTHON")
SCRIPT = Path(__file__).parent / "lm_eval_run.py"
DOCUMENTS, CHOICES = 40, 4
TASK: dict[str, Any] = {
    "task": "python_topics",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{passage}}",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "target_delimiter": " ",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}

pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="KVKEEP_LM_EVAL_PYTHON names no Python with lm-eval"
)


def sentences(topic: str) -> list[str]:
    """Return the sentences of a help topic, without its listings and headings."""
    text = re.sub(r"\s+", " ", topics.topics[topic])
    found = re.split(r"(?<=[a-z]\.) (?=[A-Z])", text)
    return [sentence for sentence in found if 40 <= len(sentence) <= 160]


def documents() -> list[dict[str, Any]]:
    """Return questions: which of four endings, of five words each, does a sentence have?"""
    rng = random.Random(0)
    by_topic = {topic: sentences(topic) for topic in sorted(topics.topics)}
    usable = [topic for topic, found in by_topic.items() if len(found) >= 4]
    result = []
    for topic in rng.sample(usable, DOCUMENTS):
        last = rng.randrange(2, len(by_topic[topic]))
        words = " ".join(by_topic[topic][last - 2 : last + 1]).split()
        answer = " ".join(words[-5:])
        others = rng.sample([name for name in usable if name != topic], CHOICES - 1)
        endings = [" ".join(rng.choice(by_topic[name]).split()[-5:]) for name in others]
        choices = [answer, *endings]
        rng.shuffle(choices)
        entry = {
            "passage": " ".join(words[:-5]),
            "choices": choices,
            "answer": choices.index(answer),
        }
        result.append(entry)
    return result


def run(folder: Path, backend: str, **model_args: Any) -> Any:
    """Run the task in the folder with a backend of lm-eval; return what the script prints."""
    assert PYTHON is not None
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    command = [PYTHON, str(SCRIPT), str(folder), TASK["task"], backend, json.dumps(model_args)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_task_has_the_accuracy_of_the_hf_backend(smollm2_fp32: Model, tmp_path: Path) -> None:
    """Every log-likelihood is the same to rounding, and so is what counts as the greedy choice."""
    data, task_folder, model_folder = (tmp_path / name for name in ("data", "task", "model"))
    data.mkdir()
    task_folder.mkdir()
    lines = [json.dumps(document) for document in documents()]
    (data / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data / "test.jsonl")}}}
    (task_folder / "python_topics.yaml").write_text(json.dumps(task))  # JSON is YAML
    export(smollm2_fp32.folder, model_folder, torch.float32, progress=False)
    name = str(model_folder)
    expected = run(task_folder, "hf", pretrained=name, dtype="float32", device="cpu")
    with running_server(smollm2_fp32, tmp_path / "server") as server:
        served = run(
            task_folder,
            "local-completions",
            model="smollm2",
            base_url=f"{server.url}/v1/completions",
            tokenizer=name,
            tokenizer_backend="huggingface",
            num_concurrent=2,
            batch_size=4,
            max_length=2048,
        )
    print(expected["versions"], expected["accuracy"], served["accuracy"])
    assert 0.5 < expected["accuracy"] == served["accuracy"]
    assert len(served["likelihoods"]) == DOCUMENTS
    for own, other in zip(served["likelihoods"], expected["likelihoods"], strict=True):
        assert [greedy for _, greedy in own] == [greedy for _, greedy in other]
        for (own_value, _), (other_value, _) in zip(own, other, strict=True):
            assert own_value == pytest.approx(other_value, rel=1e-4, abs=1e-3)
