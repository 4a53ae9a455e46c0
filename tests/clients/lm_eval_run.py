"""Run a task of lm-eval and print its results as JSON; with the Python of lm-eval's environment.

Arguments: the folder of the task, its name, a model of lm-eval, and that model's arguments (JSON).
"""

import json
import sys
from importlib.metadata import version

import lm_eval
from lm_eval.tasks import TaskManager

folder, task, model, model_args = sys.argv[1:]
results = lm_eval.simple_evaluate(
    model=model,
    model_args=json.loads(model_args),
    tasks=[task],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    bootstrap_iters=0,
    log_samples=True,
)
samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
report = {
    "accuracy": results["results"][task]["acc,none"],
    # For each document, the log-likelihood of each choice, and whether it is the greedy one.
    "likelihoods": [
        [[float(response[0]), str(response[1]) == "True"] for response in sample["filtered_resps"]]
        for sample in samples
    ],
    "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
}
print("\n" + json.dumps(report))
