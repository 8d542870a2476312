"""Draw the pictures of the site: SVG files in docs/site/pictures, one for each language.

    python docs/site/draw.py            # write them
    python docs/site/draw.py --check    # exit status 1 if a file is not what would be written

Plain text, no packages. `tests/docs/test_pictures.py` runs the check.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

FOLDER = pathlib.Path(__file__).resolve().parent / "pictures"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # of ranks
GREY, INK, PAPER = "#d9d9d9", "#222222", "#ffffff"


@dataclasses.dataclass
class Canvas:
    """A picture under construction, in units of a pixel from the upper left corner."""

    width: int
    height: int
    parts: list[str] = dataclasses.field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str = GREY) -> None:
        """A rectangle with a thin border."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{fill}" stroke="{INK}" stroke-width="0.7"/>'
        )

    def text(
        self, x: float, y: float, words: str, size: int = 13, at: str = "start", fill: str = INK
    ) -> None:
        """Words on a base line; `at` is start, middle or end."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}" '
            f'fill="{fill}">{escape(words)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> None:
        """A line with a head at its end."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" '
            f'stroke-width="1.2"{dash} marker-end="url(#head)"/>'
        )

    def labelled(
        self, x: float, y: float, width: float, words: str, fill: str = GREY, height: float = 26
    ) -> None:
        """A box with words in its middle."""
        self.box(x, y, width, height, fill)
        ink = INK if fill in (GREY, PAPER) else PAPER
        self.text(x + width / 2, y + height / 2 + 4, words, 12, "middle", ink)

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        )
        paper = f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
        return "\n".join([head, marker, paper, *self.parts, "</svg>"]) + "\n"


Words = dict[str, str]


def shards(words: Words) -> Canvas:
    """The parameters of a block in one buffer, a slice of which each rank stores."""
    canvas = Canvas(720, 250)
    names = ["attention.weight", "norm", "up.weight", "down.weight"]
    widths = [200, 40, 160, 160]
    x = 110.0
    canvas.text(10, 40, words["module"])
    for name, width in zip(names, widths, strict=True):
        canvas.labelled(x, 22, width, name if width > 60 else "n.")
        x += width
    canvas.text(10, 105, words["buffer"])
    canvas.box(110, 87, 560, 26, PAPER)
    for rank in range(4):
        canvas.labelled(110 + 140 * rank, 87, 140, f"{words['slice']} {rank}", COLOURS[rank])
    canvas.arrow(390, 52, 390, 84)
    for rank in range(4):
        left = 110 + 140 * rank
        canvas.arrow(left + 70, 116, left + 70, 146)
        canvas.box(left + 6, 150, 128, 78, PAPER)
        canvas.text(left + 70, 167, f"{words['rank']} {rank}", 12, "middle")
        for row, key in enumerate(("weights", "gradients", "states")):
            canvas.box(left + 16, 176 + 16 * row, 12, 12, COLOURS[rank])
            canvas.text(left + 34, 186 + 16 * row, words[key], 11)
    canvas.text(10, 190, words["stored"])
    return canvas


def step(words: Words) -> Canvas:
    """Gathers and reductions beside the blocks that compute."""
    canvas = Canvas(720, 190)
    x0, unit = 110.0, 58.0
    canvas.text(10, 58, words["compute"])
    canvas.text(10, 108, words["communicate"])
    forward, backward = COLOURS[0], COLOURS[1]
    for place, block in enumerate((1, 2, 3, 4)):
        canvas.labelled(x0 + unit * (place + 1), 40, unit - 4, str(block), forward)
        canvas.labelled(x0 + unit * place, 90, unit - 10, f"{words['gather']} {block}", GREY)
    for place, block in enumerate((4, 3, 2, 1)):
        canvas.labelled(x0 + unit * (place + 5), 40, unit - 4, str(block), backward)
        if block > 1:
            left = x0 + unit * (place + 5)
            canvas.labelled(left, 90, unit - 10, f"{words['gather']} {block - 1}", GREY)
        left = x0 + unit * (place + 6)
        canvas.labelled(left, 122, unit - 10, f"{words['reduce']} {block}", COLOURS[2])
    canvas.text(x0 + unit * 3, 30, words["forward"], 13, "middle")
    canvas.text(x0 + unit * 7, 30, words["backward"], 13, "middle")
    canvas.arrow(x0, 172, 700, 172)
    canvas.text(x0, 166, words["time"], 12)
    return canvas


BYTES = {"weights": 2, "gradients": 2, "states": 12}  # of a bf16 parameter under Adam


def memory(words: Words) -> Canvas:
    """Bytes per parameter that a rank stores, by the number of ranks."""
    canvas = Canvas(720, 250)
    ranks, scale, floor = (1, 2, 4, 8, 16), 11.0, 205.0
    colours = dict(zip(BYTES, COLOURS, strict=False))
    for column, count in enumerate(ranks):
        x, y = 120 + 90.0 * column, floor
        for key, size in BYTES.items():
            height = size / count * scale
            y -= height
            canvas.box(x, y, 50, height, colours[key])
        canvas.text(x + 25, y - 6, f"{sum(BYTES.values()) / count:g} B", 12, "middle")
        canvas.text(x + 25, floor + 18, str(count), 12, "middle")
    canvas.arrow(95, floor, 95, 15)
    canvas.arrow(95, floor, 590, floor)
    canvas.text(205, 24, words["bytes"], 12)
    canvas.text(345, floor + 38, words["ranks"], 12, "middle")
    for row, key in enumerate(BYTES):
        canvas.box(550, 60 + 22 * row, 12, 12, colours[key])
        canvas.text(568, 71 + 22 * row, f"{words[key]}: {BYTES[key]} B", 12)
    return canvas


def levels(words: Words) -> Canvas:
    """What a block keeps for its backward pass at each level of recomputation."""
    canvas = Canvas(720, 190)
    parts = ("input", "norm", "attention", "activation", "products")
    rows: list[tuple[str, Sequence[str]]] = [
        ("everything", parts),
        ("selective", ("input", "attention", "products")),
        ("inputs", ("input",)),
    ]
    for column, part in enumerate(parts):
        canvas.text(300 + 90 * column, 24, words[part], 12, "middle")
    for row, (name, kept) in enumerate(rows):
        y = 40 + 44.0 * row
        canvas.text(10, y + 17, words[name], 12)
        for column, part in enumerate(parts):
            fill = COLOURS[0] if part in kept else PAPER
            label = words["kept"] if part in kept else words["again"]
            canvas.labelled(260 + 90 * column, y, 80, label, fill)
    return canvas


PICTURES: dict[str, Callable[[Words], Canvas]] = {
    "shards": shards,
    "step": step,
    "memory": memory,
    "levels": levels,
}
TEXTS: dict[str, Words] = {
    "en": {
        "module": "a block",
        "buffer": "flat buffer",
        "slice": "slice",
        "rank": "rank",
        "weights": "weights",
        "gradients": "gradients",
        "states": "optimizer states",
        "stored": "stored",
        "compute": "computes",
        "communicate": "meanwhile",
        "gather": "get",
        "reduce": "sum",
        "forward": "forward",
        "backward": "backward",
        "time": "time",
        "bytes": "bytes a parameter and rank",
        "ranks": "ranks",
        "everything": "use_checkpoint=False",
        "selective": 'chosen by "auto"',
        "inputs": "use_checkpoint=True",
        "input": "input",
        "norm": "norm",
        "attention": "attention",
        "activation": "activation",
        "products": "products",
        "kept": "kept",
        "again": "again",
    },
    "zh": {
        "module": "一个块",
        "buffer": "展平缓冲区",
        "slice": "分片",
        "rank": "进程",
        "weights": "权重",
        "gradients": "梯度",
        "states": "优化器状态",
        "stored": "各自保存",
        "compute": "计算",
        "communicate": "同时通信",
        "gather": "收集",
        "reduce": "归约",
        "forward": "前向",
        "backward": "反向",
        "time": "时间",
        "bytes": "每个进程上每个参数的字节数",
        "ranks": "进程数",
        "everything": "use_checkpoint=False",
        "selective": '"auto" 选择的一级',
        "inputs": "use_checkpoint=True",
        "input": "输入",
        "norm": "归一化",
        "attention": "注意力",
        "activation": "激活函数",
        "products": "矩阵乘",
        "kept": "保留",
        "again": "重新计算",
    },
}


def drawn() -> dict[pathlib.Path, str]:
    """Every file and what belongs into it."""
    return {
        FOLDER / f"{name}.{language}.svg": draw(words).svg()
        for name, draw in PICTURES.items()
        for language, words in TEXTS.items()
    }


def main() -> int:
    """Write the files, or compare them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    old = {
        path: text
        for path, text in drawn().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in old.items():
        if check:
            print(f"{path} is not what draw.py draws: run python docs/site/draw.py")
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
