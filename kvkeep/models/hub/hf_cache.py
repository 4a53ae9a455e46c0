"""Models from the Hugging Face hub, in its own cache, shared with other programs."""

from pathlib import Path

from kvkeep.errors import ModelNotFound

_FILES = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
]


def download(repository: str, progress: bool) -> Path:
    """The folder of a hub repository's files, fetched as far as they are not here yet.

    Raises ModelNotFound, whatever the reason: the hub tells a private repository, a missing one
    and a dead network apart only in words, which are passed on.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES))
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ModelNotFound(
            f"there is no local path {repository!r}, and it cannot be had from the Hugging Face "
            f"hub ({type(error).__name__}: {said[0]}). Check the name and the network, run "
            "`hf auth login` if the model asks for it, or give a local folder or .gguf file"
        ) from error
