"""Views that are kept between steps hold no tensors of layers."""

import pytest
from small_models import local_spec, small_model

from kvkeep.session.session import Session


def kept_names(session: Session) -> set[str]:
    """Return the names of all that the views of a session's blocks hold."""
    views = [segment.block.last_view for segment in session.cache.all_segments]
    return {name for view in views if view is not None for name in vars(view)}


@pytest.mark.parametrize("has_local_layers", [False, True])
def test_no_step_leaves_tensors_of_layers_in_views(has_local_layers: bool) -> None:
    model = small_model(spec=local_spec()) if has_local_layers else small_model()
    session = model.session(200, policy="full")
    session.feed(range(1, 60))
    for _ in range(2):
        session.delete(10, 14, "suffix" if has_local_layers else "none")
        session.next_token()  # after an edit, its commit may move cells
        session.next_token()
        assert "slots" in kept_names(session)
        assert not {"keys", "values", "cell_bias"} & kept_names(session)
        session.feed([5] * 20)
        assert not {"keys", "values", "cell_bias"} & kept_names(session)
