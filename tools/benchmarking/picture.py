"""Draw measurements: a panel for each work, each contender's median step as a bar, its rounds as dots."""

from pathlib import Path

from tools.benchmarking.records import Record
from tools.errors import naming_flag


def draw(measured: dict[str, Record], output: str) -> None:
    """Draw the records of works, by their names, into a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("drawing needs the package matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    columns = min(3, len(measured))
    rows = -(-len(measured) // columns)
    options = {"figsize": (6 * columns, 2.4 * rows), "layout": "constrained", "squeeze": False}
    figure, grid = pyplot.subplots(rows, columns, **options)
    for axes in grid.flat[len(measured) :]:
        axes.set_visible(False)
    for axes, (name, record) in zip(grid.flat, measured.items()):
        results = record["results"]
        titles = list(reversed(results))  # bars are drawn from below
        colours = ["C0" if record["contenders"][title]["library"] == "ours" else "C7" for title in titles]
        is_first = axes is grid.flat[0]  # one legend is enough
        for colour, note in (("C0", "this project"), ("C7", "others")):
            seconds = [results[title]["seconds"] if own == colour else 0 for title, own in zip(titles, colours)]
            axes.barh(titles, seconds, color=colour, label=f"{note}: median of the rounds" if is_first else None)
        for title in titles:
            rounds = results[title]["all_seconds"]
            note = "a round" if is_first and title == titles[0] else None
            axes.plot(rounds, [title] * len(rounds), ".", color="black", markersize=3, label=note)
        axes.set(title=name, xlabel="seconds a step")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    with naming_flag("--picture", output, "choose a file that can be written"):
        Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120, format="png")
    pyplot.close(figure)
