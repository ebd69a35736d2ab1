"""Pages of reports: Markdown first, one HTML page made from the same; tables by pandas; figures in one style."""

import base64
import contextlib
import importlib.util
import re
from pathlib import Path
from urllib.parse import quote

from experiments import records
from runtime.errors import ConfigError
from runtime.records import fields
from tools.loss_curve import save_figure

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


def check_packages():
    """Raises ConfigError, with the command to type, where a package that reports need is not installed."""
    for module in ("pandas", "tabulate", "jinja2", "markdown_it"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"a report needs {module}: pip install -r requirements-experiments.txt")


def after_sweep(write, folder, script):
    """What write(folder) wrote at the end of a sweep; {} without the packages, and a line says how to draw it later."""
    try:
        check_packages()
    except ConfigError as error:
        print(f"the records are kept, but {error}; then: python {script} report {folder}")
        return {}
    return write(folder)


def escaped(value):
    """A value as Markdown shows it literally: no name in a record becomes a tag or a column."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|*\[\]`\\])", r"\\\1", text)


def bold(text):
    return f"**{escaped(text)}**"


def listed(lines):
    """A list in Markdown; "" of nothing."""
    return "\n".join(f"- {escaped(line)}" for line in lines)


def frame_of(rows, show):
    """Rows {column: cell} as a DataFrame of text: `show` of each cell; a missing one is a dash."""
    import pandas

    return pandas.DataFrame(rows, dtype=object).map(lambda cell: DASH if cell != cell else show(str(cell)))


def table(rows):
    """Rows as a table in Markdown, "" of none; ** begins a cell that is bold."""
    frame = frame_of(rows, lambda cell: bold(cell[2:]) if cell.startswith("**") else escaped(cell))
    return frame.rename(columns=escaped).to_markdown(index=False, tablefmt="github", disable_numparse=True) * bool(rows)


def latex(rows):
    """The same for a paper, in booktabs' rules."""
    text = frame_of(rows, lambda cell: cell.removeprefix("**")).to_latex(
        index=False, escape=True, column_format="ll" + "r" * (len(rows and rows[0]) - 2))
    return text.replace("\u00b1", r"$\pm$").replace(DASH, "--").replace(" .. ", r" \,..\, ") * bool(rows)


def titled(text, rows):
    """Blocks: a table below its text, none without rows."""
    return [text, table(rows)] if rows else []


def left_out(runs):
    """Blocks: the runs that are left out, with the reasons."""
    reasons = [f"{r.run}: {r.left_out}" for r in runs[runs.left_out != ""].itertuples()]
    return [f"Left out, {len(reasons)} of {len(runs)} planned runs:", listed(reasons)] if reasons else []


def write(path, blocks, picture=None):
    """Write a page, blocks of Markdown, to `path` (.md), and the same beside it as HTML, with the picture (a .png that
    they show) inside. Returns {kind: path}."""
    from markdown_it import MarkdownIt

    text, page = "\n\n".join(filter(None, blocks)) + "\n", Path(str(path).removesuffix(".md") + ".html")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)  # a tag in a record stays text
    title = re.sub("<[^>]+>", "", body.split("\n")[0])
    if picture:
        inline = base64.b64encode(Path(picture).read_bytes()).decode()
        body = re.sub('<img src="[^"]*"', f'<img src="data:image/png;base64,{inline}"', body)
    Path(path).write_text(text, encoding="utf-8")
    page.write_text(HTML.format(title=title, body=body), encoding="utf-8")
    return {"md": Path(path), "html": page}


def shown(picture, alt):
    """A picture beside the page, in Markdown."""
    return f"![{escaped(alt)}]({quote(Path(picture).name)})"


def report(kind, summarise, page, draw, alt, source, out=None, accept_code=()):
    """Pages and picture of a sweep's folder, and its records in one file; or of such a file. Returns {kind: path}.

    kind, accept_code: see records.read; summarise(runs): what page(runs, summary, picture) describes in blocks of
    Markdown and draw(summary, path) draws; picture: the line that shows it, and `alt` what it shows; out: path of the
    files without their endings (default: `report` in the folder, or beside the file). Raises ConfigError.
    """
    check_packages()
    source = Path(source)
    out, paths = Path(out or (source.with_suffix("") if source.is_file() else source / "report")), {}
    runs, picture = records.read(source, accept_code, kind), Path(f"{out}.png")
    with fields(f"{source}: its records"):
        summary = summarise(runs)
        blocks = page(runs, summary, shown(picture, alt) if summary else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_file():
        paths["json"] = Path(f"{out}.json")
        records.save(source, paths["json"])
    if summary:
        draw(summary, picture)
        paths["png"] = picture
    return paths | write(f"{out}.md", blocks, paths.get("png"))


@contextlib.contextmanager
def figure(path, rows, columns, width, height, style=None, **layout):
    """Yield (figure, axes (rows, columns)), panels of width x height inches, and write what is drawn there to `path`.

    style: a .mplstyle file over ours; layout: of plt.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context([STYLE, *([str(style)] if style else [])]):
        drawn, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **layout)
        yield drawn, axes
        save_figure(drawn, path, dpi=110)
