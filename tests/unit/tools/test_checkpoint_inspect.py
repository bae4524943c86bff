"""tools/checkpoint_inspect.py tells what is in a checkpoint, every damage, and where two differ."""

import shlex

import pytest
import torch
from documents import ROOT, commands_of
from said import tells
from small_checkpoints import save_one

from tools import checkpoint_inspect

X = torch.arange(2400.0).view(60, 40)


@pytest.fixture
def tool(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        code = checkpoint_inspect.main([*map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_what_is_in_a_checkpoint_is_told_and_verified(tool, tmp_path):
    save_one(
        tmp_path, 3, {"train": {"iteration": 3}, "model": "GPTModel"}, **{"model/w": X, "model/b": X[0].bfloat16()}
    )
    code, out, _ = tool("--load", tmp_path, "--verify")
    assert code == 0 and tells(out, "iteration 3 1 model: float32 2,400 9,600 bfloat16 GPTModel verified:")
    assert tool("--load", tmp_path / "iter_0000003", "--tensors", "w$")[1].count("model/w") == 1
    file = tmp_path / "iter_0000003/rank_00000.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    content[-1] ^= 1
    file.write_bytes(content)
    code, out, err = tool("--load", tmp_path, "--verify")
    assert code == 1 and out.count("DAMAGED") == 2 and tells(err, "2 iter_0000003") and err.count("\n") == 1


@pytest.mark.full
def test_two_checkpoints_are_compared_bit_by_bit_and_drawn(tool, tmp_path):
    y = X.clone()
    y[30:40, 10:20] += 0.5
    y[0, 0] = -0.0
    save_one(tmp_path / "a", 1, {"lr": 1, "same": 2}, w=X, v=X[0], only=X[1], same=X)
    save_one(tmp_path / "b", 2, {"lr": 3, "same": 2}, w=y, v=X[:2], same=X)
    code, out, err = tool("--load", tmp_path / "a", "--compare", tmp_path / "b", "--png", tmp_path / "d.png")
    assert code == 1 and "differ" in err and (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"
    assert tells(out, "w: 101 2,400 0.5 row 0, column 0") and tells(out, "only: v: (40,) (2, 40) lr: 1 3")
    assert "same" not in out.partition("compared with")[2]
    lines = [line.strip()[1:-1] for line in out.splitlines() if line.strip().startswith("|")]
    assert len(lines) == 12 and {len(line) for line in lines} == {40}
    assert lines[0][0] != " " and lines[6] == " " * 10 + "@" * 10 + " " * 20 and lines[9].strip() == ""
    code, out, _ = tool("--load", tmp_path / "a", "--compare", tmp_path / "b", "--tensors", "^same")
    assert code == 0 and "no tensor differs" in out


def test_differences_up_to_a_tolerance_are_left_out(tool, tmp_path):
    """And a NaN where there is a number is none of them."""
    y = X.clone()
    y[3, 4] += 0.25
    y[5, 6] += 0.5
    z = X.clone()
    z[0, 0] = float("nan")
    save_one(tmp_path / "a", 1, {}, w=X, z=X)
    save_one(tmp_path / "b", 1, {}, w=y, z=z)
    for tolerance, differing, told in (
        ("0", 2, "w: 2 of"),
        ("0.25", 2, "w: 1 of 2,400 elements differ, by at most 0.5; first in row 5, column 6"),
        ("0.5", 1, "z: 1 of"),
    ):
        code, out, _ = tool("--load", tmp_path / "a", "--compare", tmp_path / "b", "--tolerance", tolerance)
        assert code == 1 and f"{differing} tensor(s) differ" in out and told in out
    words = ("--load", tmp_path / "a", "--compare", tmp_path / "b", "--tensors", "w", "--tolerance", "0.5")
    code, out, _ = tool(*words)
    assert code == 0 and "no tensor differs by more than 0.5" in out


@pytest.mark.full
def test_a_picture_has_a_scale_and_squares_of_what_differs_in_parts(tool, tmp_path, monkeypatch):
    """Of 25 tensors that differ, 20 have bars: the two that differ in parts, which have squares, and those of the largest difference."""
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    y = X.clone()
    y[30:40, 10:20] += 0.5
    everywhere = {f"a{i:02}": X for i in range(23)}
    save_one(tmp_path / "a", 1, {}, **everywhere, w=X, v=X[0])
    changed = {name: x + 200 * (i + 1) for i, (name, x) in enumerate(everywhere.items())}
    save_one(tmp_path / "b", 1, {}, **changed, w=y, v=torch.cat([X[0, :20], X[0, 20:] + 2]))
    both = ("--load", tmp_path / "a", "--compare", tmp_path / "b", "--png", tmp_path / "d.png")
    assert tool(*both)[0] == 1
    (figure,) = drawn
    bars, sizes, *squares, scale = figure.get_axes()
    assert tells(bars.get_xlabel(), "% 5 more")
    widths = sorted(bar.get_width() for bar in bars.patches)
    assert widths[0] == pytest.approx(100 / 24) and widths[1] == 50 and widths[2:] == [100.0] * 18
    top = float(X.abs().max())
    relative = sorted(bar.get_width() for bar in sizes.patches)[2:]
    assert relative == pytest.approx([200 * (i + 1) / top for i in range(5, 23)])
    drawn_squares = {axes.get_title().strip(): axes for axes in squares if axes.get_visible()}
    assert set(drawn_squares) == {"w", "v"} and tells(scale.get_ylabel(), "%")
    image = drawn_squares["w"].images[0].get_array()
    assert image[30:40, 10:20].min() == 100 and image.sum() == 100 * 100
    assert drawn_squares["w"].get_xlabel() == "column" and drawn_squares["v"].get_ylabel() == "row"
    pyplot.close("all")


@pytest.mark.full
def test_where_all_differ_everywhere_squares_show_by_how_much(tool, tmp_path, monkeypatch):
    """In the picture; the text has none, since each of its characters would be the same. A NaN has no size."""
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    y = X + 0.5
    y[30:40, 10:20] += 1.5
    z = X + float("nan")
    save_one(tmp_path / "a", 1, {}, w=X, v=X[0], z=X)
    save_one(tmp_path / "b", 1, {}, w=y, v=X[0] + 1, z=z)
    code, out, _ = tool("--load", tmp_path / "a", "--compare", tmp_path / "b", "--png", tmp_path / "d.png")
    assert code == 1 and "@@@" not in out
    bars, _, square, scale = (axes for axes in drawn[0].get_axes() if axes.get_visible())
    assert [bar.get_width() for bar in bars.patches] == [100.0] * 3
    assert square.get_title().strip() == "w" and "largest difference" in scale.get_ylabel()
    values = square.images[0].get_array() * float(X.abs().max())
    assert values[30:40, 10:20].min() == pytest.approx(2) and values[:30].max() == pytest.approx(0.5)
    pyplot.close("all")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "--load"),
        (["--load", "none"], 1, "none"),
        (["--load", "{root}", "--ckpt-step", "7"], 1, "iter_0000007 1"),
        (["--load", "{root}/iter_0000001", "--ckpt-step", "2"], 2, "iter_0000001 2"),
        (["--load", "{root}", "--png", "x.png"], 2, "--png --compare"),
        (["--load", "{root}", "--compare", "{root}", "--png", "x.svg"], 2, "--png x.svg .png"),
        (["--load", "{root}", "--tensors", "("], 2, "--tensors ("),
        (["--load", "{root}", "--tolerance", "1"], 2, "--tolerance --compare"),
        (["--load", "{root}", "--compare", "{root}", "--tolerance", "-1"], 2, "--tolerance -1"),
    ],
)
def test_mistakes_are_one_line(tool, tmp_path, arguments, code, told):
    save_one(tmp_path)
    got, _, err = tool(*(word.format(root=tmp_path) for word in arguments))
    assert got == code and all(word in err for word in told.split()) and err.count("\n") == 1


def test_a_picture_shows_one_element_of_many():
    where = torch.zeros(1000, 1000, dtype=torch.bool)
    where[999, 999] = True
    lines = checkpoint_inspect.picture(where)[1:-1]
    assert [line.strip()[1:-1].strip() for line in lines] == [""] * 11 + ["."]


def test_every_command_of_the_page_runs(tool, tmp_path, monkeypatch):
    """The second checkpoint is another one."""
    monkeypatch.chdir(tmp_path)
    save_one(tmp_path / "runs/quickstart/checkpoints", 150, w=X)
    save_one(tmp_path / "runs/again", 150, w=-X)
    commands = [shlex.split(text) for text in commands_of(ROOT / "docs" / "checkpoint_format.md")]
    codes = [tool(*words[2:])[0] for words in commands if words[1] == "tools/checkpoint_inspect.py"]
    assert codes == [0, 0, 1] and (tmp_path / "differ.png").is_file()
