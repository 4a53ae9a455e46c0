"""Which modules of a model have hooks."""

from torch import nn


def hooked_modules(model: nn.Module) -> list[str]:
    """Return the names of all modules with a hook; torch lists hooks in private attributes only."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return [
        name for name, module in model.named_modules() if any(vars(module)[kind] for kind in kinds)
    ]
