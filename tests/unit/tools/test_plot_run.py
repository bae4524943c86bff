"""tools/plot_run.py reads what the product writes, as a log and as a metrics file, and says what is wrong with other files."""

from pathlib import Path

import pytest
from said import tells

from megatron.training.monitor.expert_loads import ExpertLoad, load_curves
from megatron.training.monitor.training_log import Interval, StepNumbers, training_line, validation_line
from megatron.training.monitor.writers import Record, json_line
from tools import plot_run

LOSSES = {10: 4.0, 20: 3.0, 30: float("nan"), 40: 2.0}


def log_of_run() -> str:
    """20 is trained twice, as after a restart; at 30 every step was skipped."""
    lines = ["settings that are not the default:", "  lr   0.001", training_line(interval(20, 9.0))]
    for iteration, loss in LOSSES.items():
        lines += [training_line(interval(iteration, loss)), "   progress: 10.0% done, 0:01:00 left, 300 tokens/s"]
        lines += [validation_line(f"iteration {iteration}", {"lm loss": loss + 1})]
    lines += [validation_line("iteration 40 on validation set", {"lm loss": 2.5})]
    return "\n".join([*lines, validation_line("iteration 40 on test set", {"lm loss": 99.0})]) + "\n"


def interval(iteration: int, loss: float) -> Interval:
    losses = {} if iteration == 30 else {"lm loss": loss}
    norm = None if iteration == 30 else loss / 2
    return Interval(
        StepNumbers(iteration, 8 * iteration, 8, 1e-3 * iteration, grad_norm=norm), 40, 250.0, losses, tflops=1.0
    )


def metrics_of_run() -> str:
    lines = []
    for iteration, loss in LOSSES.items():
        values = {
            "lm loss": loss,
            "learning-rate": 1e-3 * iteration,
            "grad-norm": loss / 2,
            "iteration-time": 0.25,
            "batch-size": 8,
        }
        lines.append(json_line(Record("interval", iteration, 8 * iteration, values)))
        lines.append(json_line(Record("inspect", iteration, 8 * iteration, {"mean": 0.0}, {"what": "gradient"})))
        lines.append(json_line(Record("validation", iteration, 0, {"lm loss validation": loss + 1})))
    lines.append(json_line(Record("validation", 40, 320, {"lm loss validation": 2.5}, {"at": "end"})))
    lines.append(json_line(Record("validation", 40, 320, {"lm loss test": 99.0}, {"at": "end"})))
    return "\n".join(lines) + '\n{"kind": "inter'  # killed while writing


EXPECTED = {
    "training": {10: 4.0, 20: 3.0, 40: 2.0},
    "validation": {10: 5.0, 20: 4.0, 40: 2.5},
    "learning rate": {10: 0.01, 20: 0.02, 30: 0.03, 40: 0.04},
    "gradient norm": {10: 2.0, 20: 1.5, 40: 1.0},
    "throughput": dict.fromkeys(LOSSES, 32.0),
    "busiest expert": {},
    "idlest expert": {},
}


@pytest.mark.parametrize("text", [log_of_run(), metrics_of_run()], ids=["log", "metrics file"])
def test_curves_are_what_was_written(tmp_path, text: str):
    (tmp_path / "run").write_text(text)
    assert plot_run.read_log("run", plot_run.read_text(str(tmp_path / "run"))).of == EXPECTED


def test_the_load_of_experts_is_that_of_the_busiest_and_the_idlest_of_all_layers():
    """Of two layers, of four experts and of two; their curves are those of a run."""
    loads = [ExpertLoad(0, [6, 1, 1, 0], [0, 0, 0, 1]), ExpertLoad(3, [3, 5], [0, 0])]
    curves = load_curves(loads) | {"moe/load_balancing_loss_layer_0": 9.0}
    records = [Record("interval", 5, 40, curves), Record("interval", 6, 48, load_curves(loads[1:]))]
    read = plot_run.read_log("run", "\n".join(map(json_line, records)))
    assert read.of["busiest expert"] == {5: 3.0, 6: 1.25}
    assert read.of["idlest expert"] == {5: 0.0, 6: 0.75}


@pytest.mark.full
def test_several_runs_are_drawn_in_one_picture(tmp_path, capsys, monkeypatch):
    figures = []
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", figures.append)
    (tmp_path / "a.log").write_text(log_of_run())
    (tmp_path / "b.jsonl").write_text(metrics_of_run())
    output = tmp_path / "new" / "runs.png"
    assert plot_run.main(["--log", f"{tmp_path}/a.log", f"{tmp_path}/b.jsonl", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    panels = {axes.get_title(): axes for axes in figures[0].axes}
    assert list(panels) == ["loss", "learning rate", "gradient norm", "throughput"]
    assert [line.get_label() for line in panels["loss"].lines] == [
        "a, training",
        "a, validation",
        "b, training",
        "b, validation",
    ]
    assert all(axes.get_xlabel() == "iteration" and axes.get_ylabel() for axes in panels.values())
    first, second = panels["gradient norm"].lines
    assert list(second.get_ydata()) == [2.0, 1.5, 1.0]
    assert first.get_linewidth() > second.get_linewidth(), "equal curves hide each other"
    assert all(tick == int(tick) for axes in panels.values() for tick in axes.get_xticks()), (
        "there is no half iteration"
    )
    monkeypatch.undo()
    pyplot.close(figures[0])
    assert tells(capsys.readouterr().out, "4.00 10 2.00 40 5.00")


def part(
    first: int, last: int, *, loss: float, loaded: int | None = None, saved: int | None = None, to: str = "/c"
) -> str:
    """A log of the steps first ... last, ten by ten, between a load and a save."""
    lines = [] if loaded is None else [f"loaded checkpoint of iteration {loaded} from {to}/"]
    lines += [training_line(interval(i, loss)) for i in range(first, last + 1, 10)]
    return "\n".join(lines + ([] if saved is None else [f"saved checkpoint at iteration {saved} to {to}"])) + "\n"


@pytest.mark.full
def test_the_logs_of_a_resumed_run_are_one_curve_without_a_gap(tmp_path, capsys, monkeypatch):
    figures = []
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", figures.append)
    (tmp_path / "b.log").write_text(part(50, 70, loss=2.0, loaded=40, saved=60))
    (tmp_path / "a.log").write_text(part(10, 60, loss=4.0, saved=40))  # went on to 60, and was killed
    (tmp_path / "other.log").write_text(part(10, 60, loss=5.0, saved=40, to="/d"))
    logs = [f"{tmp_path}/{name}.log" for name in ("b", "other", "a")]
    assert plot_run.main(["--log", *logs, "--output", str(tmp_path / "x.png")]) == 0
    loss = {line.get_label(): line for line in figures[0].axes[0].lines}
    assert set(loss) == {"a + b, training", "other, training"}
    assert list(loss["a + b, training"].get_xdata()) == [10, 20, 40, 50, 60, 70]  # 30 was skipped
    assert list(loss["a + b, training"].get_ydata()) == [4, 4, 4, 2, 2, 2]
    monkeypatch.undo()
    pyplot.close(figures[0])
    assert tells(capsys.readouterr().out, "4.00 10 2.00 70")


RUNS = [
    ({"a": (None, [10]), "b": (10, [20]), "c": (20, [])}, [["a", "b", "c"]]),
    ({"c": (20, []), "b": (10, [20]), "a": (None, [10])}, [["a", "b", "c"]]),
    ({"a": (None, [10]), "b": (10, []), "c": (10, [])}, [["a", "b"], ["c"]]),  # two that branch off
    ({"a": (20, [10]), "b": (10, [20])}, [["b", "a"]]),  # each goes on from the other: in some order
    ({"a": (10, [10]), "b": (30, [])}, [["a"], ["b"]]),  # itself, and what no log saves
]


@pytest.mark.parametrize(("logs", "expected"), RUNS)
def test_logs_are_put_in_the_order_of_their_checkpoints(logs, expected):
    texts = {
        name: part(1, 1, loss=1.0, loaded=loaded) + "".join(part(1, 1, loss=1.0, saved=i) for i in saved)
        for name, (loaded, saved) in logs.items()
    }
    assert plot_run.in_runs(texts) == expected


def test_what_an_appended_log_trains_again_is_forgotten():
    curves = plot_run.read_curves(part(10, 60, loss=4.0, saved=30) + part(40, 50, loss=2.0, loaded=30))
    assert curves.of["training"] == {10: 4.0, 20: 4.0, 40: 2.0, 50: 2.0}


def ramped(iteration: int, consumed: int, batch: int) -> str:
    return training_line(
        Interval(StepNumbers(iteration, consumed, batch, 1e-3, grad_norm=1.0), 40, 500.0, {"lm loss": 1.0})
    )


def test_throughput_over_a_growing_batch_counts_the_samples_of_each_step():
    """Ten steps of 4 to 8 samples; the line has the last batch alone. Half a second a step."""
    curves = plot_run.read_curves("\n".join([ramped(10, 60, 8), ramped(20, 140, 8)]))
    assert curves.of["throughput"] == {10: 12.0, 20: 16.0}
    # A resumed log's first line is of an interval whose begin no line has shown.
    later = plot_run.read_curves("\n".join(["loaded checkpoint of iteration 10 from /c/", ramped(20, 140, 8)]))
    assert later.of["throughput"] == {20: 16.0}


TEXTS_AND_SAID = [
    ("", "--log-interval"),
    ("\n \n", "is empty"),
    ("Traceback (most recent call last):\n", "pretrain_gpt.py"),
    ('{"model": "gpt", "layers": 4}\n', "JSON --metrics-file iteration"),
]


@pytest.mark.parametrize(("text", "says"), TEXTS_AND_SAID)
def test_files_of_no_run_are_refused_in_a_line(tmp_path, capsys, text: str, says: str):
    (tmp_path / "odd").write_text(text)
    assert plot_run.main(["--log", str(tmp_path / "odd"), "--output", str(tmp_path / "x.png")]) == 1
    error = capsys.readouterr().err
    assert tells(error, f"{tmp_path}/odd {says}") and error.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_missing_files_and_flags_are_said(tmp_path, capsys):
    assert plot_run.main(["--log", str(tmp_path / "none"), "--output", "x.png"]) == 1
    assert plot_run.main([]) == 2
    error = capsys.readouterr().err
    assert tells(error, f"--log {tmp_path}/none pretrain_gpt.py")
    assert "Errno" not in error and tells(error, "--log --output")


@pytest.mark.parametrize("output", ["x.xyz", "x", "x.pdf", ".png"])
def test_an_output_that_is_no_png_by_its_name_is_refused(tmp_path, capsys, monkeypatch, output: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").write_text(log_of_run())
    assert plot_run.main(["--log", "run", "--output", output]) == 2
    assert tells(capsys.readouterr().err, f"plot_run --output {output} PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


CURVES = {
    "falling": lambda i: 8 - i / 5,
    "two levels": lambda i: 4.0 * (i % 2),
    "all over": lambda i: float((i * 7919) % 31),
    "flat": lambda i: 1.0,
}


# (shape, number of runs): each shape and each number; those left out, -m sweep has
SEEN_OFTEN = [("falling", 7), ("two levels", 1), ("all over", 14), ("flat", 2)]
RARELY = [(shape, count) for shape in CURVES for count in (1, 2, 7, 14) if (shape, count) not in SEEN_OFTEN]


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        *SEEN_OFTEN[:2],
        *(pytest.param(*case, marks=pytest.mark.full) for case in SEEN_OFTEN[2:]),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in RARELY),
    ],
)
def test_no_legend_covers_a_curve(shape: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Looked up in the picture's own pixels: what is drawn without legends is drawn with them too, behind none of them."""
    import numpy
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    runs = {}
    for number in range(count):
        values = {10 * i: CURVES[shape](i) + number / 7 for i in range(1, 31)}
        curves = runs[f"a run with a long name {number}"] = plot_run.Curves()
        for name in curves.of:
            curves.of[name] = values
    plot_run.draw(runs, str(tmp_path / "x.png"))
    (figure,) = figures
    monkeypatch.undo()
    figure.canvas.draw()
    places = [axes.get_legend().get_window_extent() for axes in figure.axes if axes.get_visible()]
    assert len(places) == len(plot_run.PANELS)

    def points() -> numpy.ndarray:
        """Pixels of curves alone: [n, (x, y)]"""
        figure.set_layout_engine("none")  # nothing moves
        for axes in figure.axes:
            axes.grid(False)
            axes.set_title("")
            if axes.get_legend() is not None:
                axes.get_legend().set_visible(False)
            for spine in axes.spines.values():
                spine.set_visible(False)
            axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
        figure.canvas.draw()
        picture = numpy.asarray(figure.canvas.buffer_rgba())[..., :3]
        y, x = numpy.nonzero((picture != 255).any(-1))
        return numpy.stack([x, picture.shape[0] - y], -1)

    drawn = points()
    for place in places:
        inside = (drawn > (place.x0 + 2, place.y0 + 2)) & (drawn < (place.x1 - 2, place.y1 - 2))
        assert not inside.all(-1).any()
    pyplot.close(figure)
