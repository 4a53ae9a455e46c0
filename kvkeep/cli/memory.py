"""Options for the model, the policy and budget of its memory, and the prefix cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kvkeep.cli import compression, model_options, options
from kvkeep.cli.model_options import load_by_name
from kvkeep.cli.output import format_size, say
from kvkeep.cli.store import STORE_OPTION
from kvkeep.errors import InvalidArgument, StoreError, UnsupportedModel
from kvkeep.models.hub.library import home
from kvkeep.storage.objects import is_url, open_object_store
from kvkeep.storage.prefixes.quota import DEFAULT_MAX_BYTES
from kvkeep.types import BitsName, DtypeName, PolicyName, WeightFormat

if TYPE_CHECKING:
    from kvkeep import Model, PrefixStore, Session
    from kvkeep.storage.prefixes.block import PrefixCache

# Listed here because the modules that define them import torch, which would slow down --help.
EVICTING_POLICIES = ("sliding", "shift", "archive")  # these never evict the first `keep` tokens
POLICY_NAMES = get_args(PolicyName)
CODEC_NAMES = ("exact", "small", "smaller", "zstd", "int8", "none")
BIT_NAMES = get_args(BitsName)

CODEC_HELP = (
    "Format of the saved cells: zstd is smaller and still exact; small and smaller are 5 and 8 "
    "times smaller and round them; int8 twice."
)

MEMORY_SECTION = "Memory"  # heading of these options in the help
SINKS = 4  # attention sinks: first tokens that are never evicted
WHOLE_PROMPT = -1  # value of `--keep` for all tokens of the first prompt


def keep_option(
    help: str = "First tokens that are never evicted.",
    minimum: int = 0,
    default: int | None = SINKS,
) -> Any:
    """Declare the `--keep` option, whose range and default differ between commands."""
    shown = True if default is not None else f"the system prompt, or {SINKS}"
    return options.integer_option(minimum=minimum, default=default, show_default=shown, help=help)


@dataclass(frozen=True)
class MemoryOptions:
    """The options for a model and its memory.

    None means: for keep, the command's default; for discard, group, window, method and ratio, the
    policy's; for weights, the best format in the model's file; for kv_bits and far_bits, no
    quantisation.
    """

    model: str = model_options.MODEL_OPTION
    max_kv_size: int | None = options.integer_option(
        show_default="trained length", help="Maximum tokens held in the KV cache."
    )
    keep: int | None = keep_option()
    policy: PolicyName = options.choice_option(
        POLICY_NAMES,
        "When full: evict (sliding, shift), compress (archive), or stop (self_extend, full).",
        default=POLICY_NAMES[0],
    )
    discard: int | None = options.integer_option(
        show_default="half", help="For shift: number of oldest tokens evicted at once."
    )
    group: int | None = options.integer_option(
        show_default="4", help="For self_extend: tokens outside the window that share a position."
    )
    window: int | None = options.integer_option(
        show_default="1024; of archive 11/16 of the budget",
        help="Newest tokens: at exact positions (self_extend), or not compressed (archive).",
    )
    method: str | None = options.choice_option(
        compression.METHOD_NAMES,
        "For archive: compression method.",
        show_default=f"{compression.BEST_METHOD}, or kvzap by a calibration",
    )
    ratio: float | None = options.option(
        metavar="X",
        type=compression.parse_ratio,
        show_default="1, until the archive is full",
        help="For archive: compression ratio, such as 4.",
    )
    calibration: Path | None = options.file_option(
        exists=True,
        show_default="the model's, if there is one",
        help="For archive: a file written by `kvkeep calibrate`.",
    )
    kv_bits: BitsName | None = options.choice_option(
        BIT_NAMES,
        "Bits of cached keys and values (8/4: keys in 8, values in 4).",
        show_default="not quantised",
    )
    far_bits: BitsName | None = options.choice_option(
        BIT_NAMES, "Bits of cells outside the window.", show_default="not quantised"
    )
    checkpoint_bytes: int = options.size_option(
        "--checkpoints",
        type=options.parse_size_or_zero,
        default="256MB",
        help="Maximum memory per session for checkpoints: copies of local windows and recurrent "
        "states, from which earlier tokens are restored. 0: none.",
    )
    prefill_step: int = model_options.PREFILL_STEP_OPTION
    dtype: DtypeName = model_options.DTYPE_OPTION
    weights: WeightFormat | None = model_options.WEIGHTS_OPTION
    device: str = model_options.DEVICE_OPTION

    def check(self) -> None:
        """Check what can be checked without the model. Raises InvalidArgument."""
        if self.kv_bits is not None or self.far_bits is not None:
            from kvkeep.cache import Bits
            from kvkeep.policies import checked_bits

            checked_bits(self.policy, Bits(self.kv_bits, self.far_bits))
        # A session restored from a file keeps its policy unless --policy is given.
        settings = self._policy_settings if options.is_given("policy") else {}
        if self.calibration is not None and options.is_given("policy") and self.policy != "archive":
            raise InvalidArgument(
                f'policy "{self.policy}" does not use a calibration: leave out --calibration, or '
                "use --policy archive"
            )
        # Without either option, the budget or the default of `keep` depends on the model.
        if self.max_kv_size is not None and (self.keep is not None or not self._passes_keep):
            from kvkeep.policies import make_policy

            if self._passes_keep and self.keep is not None:
                settings |= {"keep": max(self.keep, 0)}
            make_policy(self.policy, self.max_kv_size, **settings)

    def load(self, progress: bool) -> "Model":
        return load_by_name(self.model, self.dtype, self.device, self.weights, progress)

    def new_session(
        self, model: "Model", default_keep: int = SINKS, store: "PrefixCache | None" = None
    ) -> "Session":
        return model.session(store=store, **self.settings(model, default_keep))

    def settings(self, model: "Model", default_keep: int = SINKS) -> dict[str, Any]:
        """Return the arguments of `Model.session`. default_keep: first tokens kept by default."""
        calibration = compression.load_calibration_file(self.calibration, model)
        may_calibrate = self.method in (None, "kvzap")
        if calibration is None and self.policy == "archive" and may_calibrate:
            calibration = model.calibration  # other methods do without
        keep = default_keep if self.keep is None else self.keep
        return {
            "max_kv_size": self.max_kv_size,
            "keep": keep if self._passes_keep else None,
            "policy": self.policy,
            "prefill_step": self.prefill_step,
            "checkpoint_bytes": self.checkpoint_bytes,
            "kv_bits": self.kv_bits,
            "far_bits": self.far_bits,
            "calibration": calibration,
            **self._policy_settings,
        }

    def require_room_for_chat(self, model: "Model") -> None:
        """Raise InvalidArgument if a chat's first answer cannot fit in the budget of the cache."""
        if self.max_kv_size is None or self.policy in EVICTING_POLICIES:
            return
        try:
            prompt = model.text.chat([{"role": "user", "content": "Hi"}])
        except UnsupportedModel:  # without a template, any text is a prompt
            return
        minimum = len(model.text.encode(prompt)) + 1
        if self.max_kv_size < minimum:
            raise InvalidArgument(
                f"the shortest chat takes {minimum} tokens, and policy {self.policy} stops at "
                f"--max-kv-size {self.max_kv_size}: use {minimum} or more, or a policy that evicts"
            )

    @property
    def _passes_keep(self) -> bool:
        """Whether to pass `keep` to the policy. A policy without it refuses one that was given."""
        return self.policy in EVICTING_POLICIES or options.is_given("keep")

    @property
    def _policy_settings(self) -> dict[str, Any]:
        names = ("discard", "group", "window", "method", "ratio")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PrefixOptions:
    """The options for the prefix cache, and for the store of sessions, which can also hold it."""

    store: str | None = STORE_OPTION
    prefix_cache: bool = options.option(
        is_flag=True, help="Read evaluated prompt prefixes from disk, and write new ones."
    )
    prefix_cache_bytes: int = options.size_option(
        default=format_size(DEFAULT_MAX_BYTES), help="Maximum disk space of the prefix cache."
    )
    secret_file: Path | None = options.file_option(
        envvar="KVKEEP_SECRET_FILE",
        exists=True,
        help="Secret shared by all users of a prefix cache in an object store.",
    )

    def check(self) -> None:
        """Raise InvalidArgument for a limit of disk space or a secret that would not be used."""
        check_prefix_limit(self.prefix_cache, self.store)
        is_shared = self.prefix_cache and self.store is not None and is_url(self.store)
        if options.is_in_command_line("secret_file") and not is_shared:
            raise InvalidArgument(
                "--secret-file is for a prefix cache in an object store: add --prefix-cache and "
                "--store URL"
            )

    def open_prefix_cache(self, model: "Model", codec: str | None = None) -> "PrefixCache | None":
        """Open the prefix cache. Returns None if it is off, or with a warning if that fails.

        codec: as of `--codec`; cells of others than small and smaller are stored exactly.
        """
        if not self.prefix_cache:
            return None
        from kvkeep.storage.prefixes.coding import block_codec

        codec = block_codec(codec or "exact")
        try:
            if self.store is None or not is_url(self.store):
                return open_prefix_store(self.prefix_cache_bytes, codec)
            from kvkeep.fleet.config import read_secret
            from kvkeep.storage.prefixes.shared import SharedPrefixCache

            # Several machines share it: its size is limited only by `kvkeep prefixes gc`.
            object_store, secret = open_object_store(self.store), read_secret(self.secret_file)
            return SharedPrefixCache(object_store, secret, model.arithmetic, codec=codec)
        except StoreError as error:
            warn_prefix_cache_off(str(error))
            return None


@dataclass(frozen=True)
class SessionOptions:
    """The options for a command's sessions."""

    memory: MemoryOptions = options.option_group(MemoryOptions, section=MEMORY_SECTION)
    prefixes: PrefixOptions = options.option_group(PrefixOptions, section="Storage")
    sampling: options.SamplingOptions = options.option_group(
        options.SamplingOptions, section="Sampling"
    )

    def check(self) -> None:
        """Check what can be checked without the model. Raises InvalidArgument."""
        self.sampling.resolve()
        self.memory.check()
        self.prefixes.check()

    def open_prefix_cache(self, model: "Model", codec: str | None = None) -> "PrefixCache | None":
        """Open the prefix cache unless it is off or of no use; see `PrefixOptions`."""
        if not uses_prefix_cache(self.memory, self.prefixes.prefix_cache):
            return None
        return self.prefixes.open_prefix_cache(model, codec)


def check_prefix_limit(prefix_cache: bool, store: str | None) -> None:
    """Raise InvalidArgument if --prefix-cache-bytes is given and would limit nothing."""
    if not options.is_in_command_line("prefix_cache_bytes"):
        return
    if not prefix_cache:
        raise InvalidArgument("--prefix-cache-bytes limits the prefix cache: add --prefix-cache")
    if store is not None and is_url(store):
        raise InvalidArgument(
            "--prefix-cache-bytes limits a prefix cache in a folder: in an object store, which "
            "others share, `kvkeep prefixes gc` removes the oldest prefixes"
        )


def warn_prefix_cache_off(reason: str) -> None:
    say(f"continuing without the prefix cache: {reason}")


def uses_prefix_cache(memory: MemoryOptions, prefix_cache: bool) -> bool:
    """Whether sessions use the prefix cache. Warns if they cannot.

    Cached prefixes were evaluated over unquantised cells. With quantised ones, answers would depend
    on cache hits.
    """
    if prefix_cache and (memory.kv_bits or memory.far_bits):
        warn_prefix_cache_off(
            "--kv-bits and --far-bits round cells, and the prefix cache stores them unrounded"
        )
        return False
    return prefix_cache


def open_prefix_store(max_bytes: int = DEFAULT_MAX_BYTES, codec: str = "exact") -> "PrefixStore":
    from kvkeep import PrefixStore

    return PrefixStore(home() / "prefixes", max_bytes, codec)


def session_options(keep: Any) -> Any:
    """Declare the options of a `SessionOptions`. keep: the declaration of `--keep`."""
    memory = options.option_group(MemoryOptions, section=MEMORY_SECTION, keep=keep)
    return options.option_group(SessionOptions, memory=memory)
