"""Write a drawing into the kind of file that its name says: SVG as it is, PNG by matplotlib."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from megatron.core.base.dataclass_flags import flag_of
from tools.errors import naming_flag

KINDS = (".svg", ".png")
_PIXELS_PER_UNIT = 2  # of a PNG, for screens of high resolution


def kind_problems(name: str, path: str | None) -> Iterator[str]:
    """Yield a problem if the option `name` has a file whose ending names neither SVG nor PNG."""
    if path is not None and Path(path).suffix.lower() not in KINDS:
        yield f"{flag_of(name)} ({path}) must end in .svg or .png, which says what is written"


def write_drawing(flag: str, path: str, svg: str) -> None:
    """Write a drawing, the text of an SVG of this project, as what the ending of `path` says."""
    with naming_flag(flag, path, "choose a file that can be written"):
        Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        if Path(path).suffix.lower() == ".png":
            _write_png(path, svg)
        else:
            Path(path).write_text(svg, encoding="utf-8")


def _write_png(path: str, svg: str) -> None:
    """Draw the rectangles, polygons, lines and texts of an SVG; groups are gone into, and tooltips have no place."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("a PNG needs the package matplotlib (pip install matplotlib); an SVG needs none") from None
    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import patches, pyplot

    root = ElementTree.fromstring(svg)
    width = float(root.get("width"))
    height = float(root.get("height"))
    figure = pyplot.figure(figsize=(width / 72, height / 72))  # a unit is a point
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")

    def length(element: ElementTree.Element, name: str, whole: float) -> float:
        text = element.get(name, "0")
        return whole * float(text[:-1]) / 100 if text.endswith("%") else float(text)

    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        look = {
            "facecolor": element.get("fill", "black"),
            "edgecolor": element.get("stroke", "none"),
            "linewidth": 0.8,
            "alpha": float(element.get("fill-opacity", 1)),
        }
        if kind == "rect":
            corner = (length(element, "x", width), length(element, "y", height))
            sizes = (length(element, "width", width), length(element, "height", height))
            axes.add_patch(patches.Rectangle(corner, *sizes, **look))
        elif kind == "polygon":
            numbers = [float(number) for number in re.findall(r"[-\d.]+", element.get("points"))]
            axes.add_patch(patches.Polygon(list(zip(numbers[::2], numbers[1::2])), **look))
        elif kind == "line":
            ends = [float(element.get(name)) for name in ("x1", "x2", "y1", "y2")]
            axes.plot(ends[:2], ends[2:], color=element.get("stroke", "black"), linewidth=0.8)
        elif kind == "text":
            sides = {"start": "left", "middle": "center", "end": "right"}
            axes.text(
                float(element.get("x")),
                float(element.get("y")),
                element.text,
                fontsize=float(element.get("font-size", root.get("font-size", 12))) * 0.9,
                ha=sides[element.get("text-anchor", "start")],
                va="baseline",
            )
    figure.savefig(path, dpi=72 * _PIXELS_PER_UNIT, format="png")
    pyplot.close(figure)
