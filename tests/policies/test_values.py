"""A policy is a value: it can be made, compared and shared, and refuses invalid settings."""

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from small_models import small_model

from kvkeep.cache import Bits
from kvkeep.errors import InvalidArgument
from kvkeep.policies import Archive, Full, Policy, SelfExtend, Shift, Sliding, make_policy

MODEL = small_model(max_positions=512)
PROMPT = list(range(1, 120))
VALUES: list[tuple[Policy, dict[str, Any]]] = [
    (Sliding(48, keep=3), {"policy": "sliding", "keep": 3}),
    (Shift(48, discard=9), {"policy": "shift", "discard": 9}),
    (
        Archive(48, window=20, ratio=2.0, method="keydiff"),
        {"policy": "archive", "window": 20, "ratio": 2.0, "method": "keydiff"},
    ),
    (SelfExtend(48, group=2, window=16), {"policy": "self_extend", "group": 2, "window": 16}),
    (Full(48), {"policy": "full"}),
]


@pytest.mark.parametrize(("policy", "named"), VALUES, ids=lambda x: getattr(x, "name", ""))
def test_a_policy_object_equals_its_name_with_settings(
    policy: Policy, named: dict[str, Any]
) -> None:
    by_value, by_name = MODEL.session(policy=policy), MODEL.session(48, **named)
    assert by_value.settings == by_name.settings
    for session in (by_value, by_name):
        session.feed(PROMPT[: session.room])
    assert by_value.logits.equal(by_name.logits)
    assert by_value.cache.cells == by_name.cache.cells


@pytest.mark.parametrize("policy", [policy for policy, _ in VALUES], ids=lambda x: x.name)
def test_a_policy_is_made_again_from_its_settings(policy: Policy) -> None:
    assert make_policy(policy.name, **policy.settings()) == policy
    assert hash(policy) == hash(make_policy(policy.name, **policy.settings()))


@pytest.mark.parametrize("policy", [policy for policy, _ in VALUES], ids=lambda x: x.name)
def test_a_policy_is_never_changed_by_a_session(policy: Policy) -> None:
    before = repr(policy)
    changed, other = MODEL.session(policy=policy), MODEL.session(policy=policy)
    for session in (changed, other):
        session.feed(PROMPT[:40])
    if isinstance(policy, (Sliding, Archive)):
        changed.pin(30, 33)
        changed.keep = 5 if isinstance(policy, Sliding) else policy.keep
    assert repr(policy) == before
    other.feed(PROMPT[: other.room])
    assert other.settings == MODEL.session(policy=policy).settings
    with pytest.raises(FrozenInstanceError):
        policy.max_kv_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "named_setting"),
    [
        ({"policy": "full", "keep": 8}, "keep"),
        ({"policy": "full", "keep": -1}, "keep"),
        ({"policy": "self_extend", "keep": 8}, "keep"),
        ({"policy": "sliding", "discard": 8}, "discard"),
        ({"policy": "sliding", "window": 8}, "window"),
        ({"policy": "shift", "ratio": 2.0}, "ratio"),
        ({"policy": "full", "far_bits": "8"}, "far_bits"),
        ({"policy": Sliding(32), "keep": 8}, "keep"),
        ({"policy": Sliding(32), "max_kv_size": 8}, "max_kv_size"),
        ({"policy": Archive(64), "method": "sum"}, "method"),
        ({"policy": Sliding(513)}, "max_kv_size"),
        ({"policy": Archive(64, span=600)}, "span"),
        ({"policy": Sliding(32), "bits": Bits("8"), "kv_bits": "4"}, "bits"),
        ({"policy": Sliding(32), "bits": Bits("5")}, "kv_bits"),
        ({"policy": 5}, "policy"),
    ],
)
def test_settings_without_meaning_are_refused(
    arguments: dict[str, Any], named_setting: str
) -> None:
    with pytest.raises(InvalidArgument, match=named_setting):
        MODEL.session(**arguments)


@pytest.mark.parametrize("policy_class", [Sliding, Shift, Archive, SelfExtend, Full])
@pytest.mark.parametrize("size", [0, -1, 8.0, "8", None, True])
def test_a_budget_is_a_whole_number_of_cells(policy_class: Any, size: Any) -> None:
    with pytest.raises(InvalidArgument):
        policy_class(size)


def test_numpy_numbers_become_python_numbers() -> None:
    settings = Archive(np.int64(64), np.int32(2), ratio=np.float32(2)).settings()
    assert {type(value) for value in settings.values()} == {int, float, str}


def test_bits_can_be_passed_as_an_object() -> None:
    assert MODEL.session(policy=Sliding(32), bits=Bits(kv="8")).bits == Bits("8", None)


def test_all_public_names_are_in_kvkeep() -> None:
    import kvkeep

    for name in kvkeep.__all__:
        assert name == "__version__" or getattr(kvkeep, name).__name__ == name


@pytest.mark.parametrize(
    ("name", "new_name"),
    [("settle", "enforce_bounds"), ("discards", "discard_count"), ("exact", "exact_tokens")],
)
def test_a_policy_that_defines_a_method_by_its_old_name_is_refused(
    name: str, new_name: str
) -> None:
    """Nothing would call it, and so the policy would silently be another one."""
    assert hasattr(Policy, new_name)
    message = rf"Own\.{name} is an old hook name that is never called: rename it to {new_name}"
    with pytest.raises(TypeError, match=message):
        type("Own", (Sliding,), {name: lambda self, cache: 0})
    assert type("Own", (Sliding,), {new_name: lambda self, cache: 0})
