"""Report pages: Markdown, and one HTML page made from the same text. Tables are by pandas, figures in one style."""

import base64
import contextlib
import re
from pathlib import Path
from urllib.parse import quote

from common.errors import ConfigError
from experiments import records
from runtime.loss_curve import save_figure
from runtime.records import fields

DASH = "\u2013"
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "axes.edgecolor": "#777777", "axes.axisbelow": True,
         "xtick.color": "#444444", "ytick.color": "#444444", "xtick.minor.size": 0, "ytick.minor.size": 0,
         "text.parse_math": False}
HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; max-width: 66rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif }}
p, ul {{ max-width: 46rem; overflow-wrap: break-word }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem }}
th, td {{ padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8886 }}
th:first-child, td:first-child {{ text-align: left }} img {{ max-width: 100% }}
</style></head><body>
{body}</body></html>
"""


def after_sweep(write, folder, script):
    """Write the report at the end of a sweep: what write(folder) returns. If a package is missing, print the commands
    that make it later and return {}."""
    try:
        records.check_packages()
    except ConfigError as error:
        print(f"the records are kept, but there is no report: {error}; then: python {script} report {folder}")
        return {}
    return write(folder)


def escaped(value):
    """A value as literal text in Markdown, so that no name in a record becomes a tag or a table column."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|*\[\]`\\]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)  # not snake_case


def bold(text):
    return f"**{escaped(text)}**"


def human(n, digits=3):
    """1485888 as '1.49M'."""
    n = float(f"{n:.{digits}g}")
    unit, scale = next((u for u in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if n >= u[1]), ("", 1))
    return f"{n / scale:g}{unit}"


def listed(lines):
    """A list in Markdown; "" if there are no lines."""
    return "\n".join(f"- {escaped(line)}" for line in lines)


def table(rows):
    """Rows {column: cell} as a Markdown table, "" if there are none. A missing cell is a dash; one that begins with **
    becomes bold."""
    import pandas

    def shown(cell):
        if cell != cell:
            return DASH
        text = str(cell)
        return bold(text[2:]) if text.startswith("**") else escaped(text)

    frame = pandas.DataFrame(rows, dtype=object).map(shown)
    return frame.rename(columns=escaped).to_markdown(index=False, tablefmt="github", disable_numparse=True) * bool(rows)


def titled(text, rows):
    """Blocks: a text and its table, or none if there are no rows."""
    return [text, table(rows)] if rows else []


def left_out(runs):
    """Blocks: the runs that were left out, with reasons."""
    reasons = [f"{r.run}: {r.left_out}" for r in runs[runs.left_out != ""].itertuples()]
    return [f"Left out, {len(reasons)} of {len(runs)} planned runs:", listed(reasons)] if reasons else []


def write(path, blocks, picture=None):
    """Write blocks of Markdown to `path` (.md), and the same page as .html with the picture (a .png that the blocks
    show) embedded. Returns {kind: path}."""
    from markdown_it import MarkdownIt

    text, page = "\n\n".join(filter(None, blocks)) + "\n", Path(str(path).removesuffix(".md") + ".html")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)  # tags in records stay text
    title = re.sub("<[^>]+>", "", body.split("\n")[0])
    if picture:
        inline = base64.b64encode(Path(picture).read_bytes()).decode()
        body = re.sub('<img src="[^"]*"', f'<img src="data:image/png;base64,{inline}"', body)
    Path(path).write_text(text, encoding="utf-8")
    page.write_text(HTML.format(title=title, body=body), encoding="utf-8")
    return {"md": Path(path), "html": page}


def shown(picture, alt):
    """The Markdown that shows a picture in the page's folder."""
    return f"![{escaped(alt)}]({quote(Path(picture).name)})"


def report(kind, summarise, page, draw, alt, source, out=None, accept_code=()):
    """Write pages and figure from a sweep's folder, and its records in one file; or from such a file.

    Args:
        kind, accept_code: see records.read.
        summarise: summarise(runs) returns the points, of which page(runs, points, picture) makes blocks of Markdown and
            draw(points, path) the figure; `picture` is the line that shows it, with `alt` as its text.
        out: path of the files without extension (default: `report` in the folder, or beside the file).
    Returns {kind: path}. Raises ConfigError.
    """
    records.check_packages()
    source = Path(source)
    out, paths = Path(out or (source.with_suffix("") if source.is_file() else source / "report")), {}
    runs, picture = records.read(source, accept_code, kind), Path(f"{out}.png")
    with fields(f"{source}: its records"):
        points = summarise(runs)
        blocks = page(runs, points, shown(picture, alt) if points else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_file():
        paths["json"] = Path(f"{out}.json")
        records.save(source, paths["json"])
    if points:
        draw(points, picture)
        paths["png"] = picture
    return paths | write(f"{out}.md", blocks, paths.get("png"))


@contextlib.contextmanager
def figure(path, rows, columns, width, height, style=None, **layout):
    """Yields (figure, axes (rows, columns)) with panels of width x height inches, then writes the figure to `path`.

    style: a .mplstyle file applied over STYLE; layout: arguments of plt.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context([STYLE, *([str(style)] if style else [])]):
        drawn, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **layout)
        yield drawn, axes
        save_figure(drawn, path, dpi=110)
