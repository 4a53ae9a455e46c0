"""`kvkeep doctor` and `kvkeep disk`: the kernels on this machine, and kvkeep's disk usage."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvkeep.cli.model_options import DTYPE_OPTION, WEIGHTS_OPTION, complete_models
from kvkeep.cli.options import JSON_OPTION, command, option
from kvkeep.cli.output import echo_facts, echo_json, format_mb
from kvkeep.cli.store import default_session_folder
from kvkeep.models.hub.library import data_folder, data_folders, home
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.storage.files.atomic import folder_size
from kvkeep.types import DtypeName, WeightFormat

if TYPE_CHECKING:
    from kvkeep.doctor import CudaFacts, Findings, KernelFacts, ModelSpeed, ThreadFacts, TorchFacts

_Facts = Iterator[tuple[str, str]]  # label and text of each line
# Folders in kvkeep's home: a description, and the command that frees space there.
_DISK_FOLDERS = {
    "models": ("models, in Hugging Face layout", "kvkeep models rm NAME"),
    "downloads": ("interrupted model downloads", "kvkeep pull NAME"),
    "packed": ("packed weights", "kvkeep models rm NAME | FOLDER"),
    "unpacked": ("unpacked weights for bf16", "kvkeep models rm NAME"),
    "prefixes": ("the prefix cache", "kvkeep prefixes gc | clear"),
}
# Kinds of data that are in the data folder, those of older versions and prompts in the home.
_DATA_FOLDERS = {
    "calibrations": "calibrations for compression",
    "bases": "bases of the codecs small and smaller",
    "server": "sessions and prefix cache of `kvkeep serve`",
}


@command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=complete_models)
def doctor(
    name: str,
    dtype: DtypeName = DTYPE_OPTION,
    weights: WeightFormat | None = WEIGHTS_OPTION,
    measure: bool = option(is_flag=True, help="Also measure decoding of 40 tokens."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Show which kernels run on this machine, and how fast model NAME can be.

    Takes about a second, to measure memory bandwidth. No model is fetched.
    """
    from kvkeep.doctor import examine

    findings = examine(name, dtype, weights, measure)
    if as_json:
        echo_json(asdict(findings))
    else:
        echo_facts(_labelled_facts(findings))


def _labelled_facts(findings: "Findings") -> _Facts:
    yield "kvkeep", f"{findings.kvkeep}; Python {findings.python}; {findings.system}"
    features = findings.processor.features
    feature_list = "features unknown" if features is None else " ".join(features)
    yield "processor", f"{findings.processor.name}: {feature_list or 'no known feature'}"
    yield from _kernel_facts(findings.kernels)
    yield "threads", _threads_text(findings.threads)
    memory = findings.memory
    speed = f"bandwidth {_format_gb_per_s(memory.read_per_s)} over {format_mb(memory.read_size)}"
    yield "memory", f"{format_mb(memory.total)}, {format_mb(memory.available)} available; {speed}"
    yield "torch", _torch_text(findings.torch)
    yield "CUDA", _cuda_text(findings.cuda)
    if findings.model is None:
        yield "model", findings.no_model
    else:
        yield from _model_facts(findings.model, memory.read_per_s)


def _kernel_facts(kernels: "KernelFacts") -> _Facts:
    yield "kernels", "none; PyTorch is used" if kernels.name == "torch" else kernels.name
    yield from (("", f"the {name} kernels {why}") for name, why in kernels.against.items())
    yield from (("", f"{name}={value}") for name, value in kernels.environment.items())


def _threads_text(threads: "ThreadFacts") -> str:
    parts = [f"{threads.used} on {threads.cores} cores"]
    if threads.load is not None:
        parts[0] += f", load {threads.load:g}"
    if threads.quota is not None:
        parts.append(f"cgroup CPU quota {threads.quota:g}")
    return "; ".join([*parts, *(f"{k}={v}" for k, v in threads.environment.items())])


def _torch_text(build: "TorchFacts") -> str:
    libraries = ", ".join(build.libraries) or "no MKL or oneDNN"
    bf16_support = {
        True: "oneDNN supports bfloat16",
        False: "oneDNN does not support bfloat16 on this processor",
        None: "no oneDNN for bfloat16",
    }[build.multiplies_bf16]
    prompts = f"prefill of bfloat16 models multiplies in {build.prompts}"
    return f"{build.version} with {libraries}, for {build.capability}; {bf16_support}; {prompts}"


def _cuda_text(cuda: "CudaFacts") -> str:
    if cuda.devices:
        return f"{', '.join(cuda.devices)}: used with `--device cuda` only"
    return "no GPU found" if cuda.built_for else "none: this torch is built without CUDA"


def _model_facts(model: "ModelSpeed", bytes_per_second: float) -> _Facts:
    yield "model", f"{model.name}: decode by {model.decode}"
    read = f"{format_mb(model.bytes_per_token)} read per token"
    max_speed = f"at most {model.most_tokens_per_s:,.0f} tokens/s"
    yield "", f"{read}: {max_speed} at {_format_gb_per_s(bytes_per_second)}, with few cells"
    if model.measured_tokens_per_s is not None:
        yield "", f"measured: {model.measured_tokens_per_s:,.0f} tokens/s"
    if model.checkpoint_bytes:
        states = f"{format_mb(model.state_bytes)} of states" if model.state_bytes else "no states"
        yield "", f"a session has {states}, and {format_mb(model.checkpoint_bytes)} a checkpoint"


def _format_gb_per_s(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:,.1f} GB/s"


@command()
def disk(as_json: bool = JSON_OPTION) -> None:
    """Show kvkeep's disk usage by kind, and the commands that free space."""
    sessions = default_session_folder()
    size = sum(path.stat().st_size for path in sessions.newest_first())
    rows = [("sessions", size, "saved sessions", "kvkeep sessions rm NAME", str(sessions.root))]
    other_bytes = folder_size(home())
    for folder_name, (description, cleanup_command) in _DISK_FOLDERS.items():
        size = folder_size(home() / folder_name)
        rows.append((folder_name, size, description, cleanup_command, str(home() / folder_name)))
        other_bytes -= size
    for kind, description in _DATA_FOLDERS.items():
        sizes = {folder: folder_size(folder) for folder in data_folders(kind)}
        rows.append((kind, sum(sizes.values()), description, "", str(data_folder() / kind)))
        other_bytes -= sizes[home() / kind]
    other_bytes -= folder_size(home() / "sessions")
    rows.append(("other", max(0, other_bytes), "locks and other small files", "", str(home())))
    if as_json:
        keys = ("kind", "bytes", "what", "remedy", "place")
        click.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return
    for kind, size, description, cleanup, _ in rows:
        click.echo(f"{kind:<12}  {format_mb(size):>10}  {description:<39}  {cleanup}".rstrip())
    places = " and ".join(dict.fromkeys((str(home()), str(data_folder()))))
    click.echo(f"{'all':<12}  {format_mb(sum(row[1] for row in rows)):>10}  in {places}")
