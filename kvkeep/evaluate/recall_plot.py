"""A picture of recall: how often a fact is found, by where in the text it lay."""

from collections.abc import Sequence
from statistics import fmean

from kvkeep.evaluate.plot import picture
from kvkeep.evaluate.recall import Outcome

MOST = 11  # different depths that are shown as they are; more are gathered in tenths of the text


def draw_depths(measured: Sequence[Outcome], title: str, suffix: str) -> bytes:
    """The picture as a file's content: the share found over depth, compressed and not."""
    from matplotlib.figure import Figure

    groups = by_depth(measured)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title)
    shares = [fmean(each.compressed.found for each in group) for group in groups.values()]
    axes.plot(list(groups), shares, marker="o", label="compressed")
    whole = {
        depth: [each.uncompressed.found for each in group if each.uncompressed is not None]
        for depth, group in groups.items()
    }
    fitted = {depth: fmean(found) for depth, found in whole.items() if found}
    if fitted:
        axes.plot(
            *(list(fitted), list(fitted.values())),
            marker=".",
            color="black",
            ls="--",
            label="uncompressed",
        )
    for depth, share in zip(groups, shares, strict=True):
        note = f"{len(groups[depth])}"
        axes.annotate(note, (depth, share), (0, 6), textcoords="offset points", ha="center")
    axes.set_xlabel("depth in the text (%); at each point, the number of samples")
    axes.set_ylabel("found")
    axes.set_xlim(-3, 103)
    axes.set_ylim(-0.03, 1.12)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return picture(figure, suffix)


def by_depth(measured: Sequence[Outcome]) -> dict[float, list[Outcome]]:
    """Samples by depth, in percent; where there are many depths, by the middle of each tenth."""
    exact = len({each.sample.depth for each in measured}) <= MOST
    groups: dict[float, list[Outcome]] = {}
    for each in measured:
        depth = each.sample.depth
        groups.setdefault(depth if exact else 10 * min(9, depth // 10) + 5, []).append(each)
    return dict(sorted(groups.items()))
