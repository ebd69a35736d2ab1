"""Report pages: Markdown, one HTML page made from the same text, and a figure. Every experiment's report is a Page.

    a table      rows {key: value} of numbers, and columns {heading: template of a cell}, as in {"loss": "{mean:.4f}"}
    a figure     Panels of Curves with intervals (experiments/figures.py)
"""

import base64
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from common.errors import ConfigError, printable
from common.files import write_text
from experiments import figures, records
from runtime.records import fields

DASH = "\u2013"
HTML = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; max-width: 75rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif }}
p, ul {{ max-width: 46rem; overflow-wrap: break-word }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem }}
th, td {{ padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8886 }}
th {{ white-space: normal }} th:first-child, td:first-child {{ text-align: left }}
p:has(img) {{ max-width: none; overflow-x: auto }} img {{ max-width: max(100%, 56rem) }}
</style></head><body>
{body}</body></html>
"""


@dataclass
class Page:
    """The content of a report: its sentences, blocks of Markdown above and below the figure, and the figure's Panels.
    csv: {name: DataFrame} for files beside the page; a file begins with its attrs["head"], if any."""

    sentences: list
    above: list
    panels: list
    below: list
    csv: dict = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------------- text

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


def table(rows, columns=None, title=""):
    """Rows {key: value} as a Markdown table below its title; "" if there are none.

    columns: {heading: template of its cells}, filled from the row; None: the rows are {heading: text}. A cell whose
    value is missing is a dash, and a column of dashes is left out; a cell that begins with ** becomes bold.
    """
    import pandas

    if not rows:
        return ""
    if columns:
        rows = [{heading: filled(template, row) for heading, template in columns.items()} for row in rows]
    frame = pandas.DataFrame(rows, dtype=object).fillna(DASH).astype(str)
    frame = frame.loc[:, (frame != DASH).any()]
    frame = frame.map(lambda cell: bold(cell[2:]) if cell.startswith("**") else escaped(cell))
    grid = frame.rename(columns=escaped).to_markdown(index=False, tablefmt="github", disable_numparse=True)
    return f"{title}\n\n{grid}" if title else grid


def filled(template, row):
    try:
        return template.format(**{key: value for key, value in row.items() if value is not None})
    except KeyError:
        return DASH


def origin(runs):
    """In words: how many runs count, where and when they ran, and with which software and code."""
    used = runs[runs.left_out == ""]

    def all_of(key):
        values = used[key].dropna() if key in used else []
        return ", ".join(dict.fromkeys(str(value) for value in values if value)) or "unknown"

    days = sorted(str(time)[:10] for time in used.time if time)
    began = " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    commits = {}
    for commit, changed in zip(used.commit, used.uncommitted_changes, strict=True):
        if commit:
            commits[commit[:12] + " with uncommitted changes" * (changed is True)] = None
    return (f"{len(used)} of {len(runs)} runs are used. {all_of('device')}; started {began or 'unknown'}; torch "
            f"{all_of('torch')}, Python {all_of('python')}, products in {all_of('dtype')}; commit "
            f"{', '.join(commits) or 'unknown'}, code {all_of('code')}.")


def uncommitted(runs):
    """Blocks of Markdown: how the code of runs with uncommitted changes differed from its commit."""
    diffs = runs.attrs.get("uncommitted", [])
    return ["## Uncommitted changes", *(textwrap.indent(diff, "    ") for diff in diffs)] if diffs else []


def code(runs):
    """Blocks of Markdown: the versions of the runs' code, if there are several."""
    versions = runs.attrs["code"]
    how = "Only runs of the first version are compared."
    if runs.attrs["accepted"]:
        how = f"Runs of {', '.join(runs.attrs['accepted'])} are compared with the others because of --accept_code."
    if len(versions) < 2:
        return []
    rows = []
    for version in versions:
        changed = version["changed_files"]
        if changed is not None:
            changed = ", ".join(changed) or "none"
        rows.append(version | {"changed": changed})
    columns = {"code": "{code}", "commit": "{commit:.12}", "runs": "{runs}", "used": "{used}",
               "files that differ from the first": "{changed}"}
    return [table(rows, columns, f"The runs have {len(versions)} versions of the code. A version is identified by "
                                 f"the contents of the imported files. {escaped(how)}")]


def left_out(runs):
    """The runs that were left out, with reasons; "" if there are none."""
    lines = []
    for reason, group in runs[runs.left_out != ""].groupby("left_out", sort=False):
        lines.append(f"{reason} ({len(group)}): {', '.join(group.run)}")
    count = sum(runs.left_out != "")
    return f"Left out, {count} of {len(runs)} planned runs:\n\n{listed(lines)}" if lines else ""


# ---------------------------------------------------------------------------------------------------------------- files

def write(title, page, out, style=None):
    """Write a Page as `out`.md, as .html with the figure inside, and the figure as .png; style: see figures.draw.
    Returns {kind: path}."""
    from markdown_it import MarkdownIt

    paths = {kind: Path(f"{out}.{kind}") for kind in ("md", "html")}
    picture = ""
    if page.panels:
        paths["png"] = Path(f"{out}.png")
        figures.draw(page.panels, paths["png"], style)
        alt = escaped("; ".join(map(figures.in_words, page.panels)))
        picture = f"![{alt}]({quote(paths['png'].name)})"
    blocks = [f"# {title}", *map(bold, page.sentences), *page.above, picture, *page.below]
    text = printable("\n\n".join(filter(None, blocks)) + "\n")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)  # tags in records stay text
    if picture:
        inline = base64.b64encode(paths["png"].read_bytes()).decode()
        body = re.sub('<img src="[^"]*"', f'<img src="data:image/png;base64,{inline}"', body)
    write_text(paths["md"], text)
    heading = re.sub("<[^>]+>", "", body.split("\n")[0])
    write_text(paths["html"], HTML.format(title=heading, body=body))
    return paths


def report(kind, title, page_of, source, out=None, accept_code=(), style=None):
    """Write page and figure from a sweep's folder or saved file, and print the page's sentences. A folder's records are
    also saved to one file.

    Args:
        kind, accept_code: see records.read.
        page_of: page_of(runs) returns the Page; at least one run counts.
        out: path of the files without extension (default: `report` in the folder, or beside the file).
        style: a .mplstyle file for the figure, over ours.
    Returns {kind: path}. Raises ConfigError, OSError if `out` cannot be written.
    """
    records.check_packages()
    if style and not Path(style).is_file():
        raise ConfigError(f"--style={style}: there is no such file")
    source = Path(source)
    out = Path(out or (source.with_suffix("") if source.is_file() else source / "report"))
    runs = records.read(source, accept_code, kind)
    page = Page(["There is no usable run."], [], [], [])
    with fields(f"{source}: its records"):
        if (runs.left_out == "").any():
            page = page_of(runs)
        page.above = [escaped(origin(runs)), *page.above]
        page.below = [*page.below, *code(runs), *uncommitted(runs), left_out(runs)]
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = {}
    if not source.is_file():
        paths["json"] = Path(f"{out}.json")
        records.save(source, paths["json"])
    for name, rows in page.csv.items():
        paths[name] = out.with_name(f"{name}.csv")
        write_text(paths[name], rows.attrs.get("head", "") + rows.to_csv(index=False))
    for sentence in page.sentences:
        print(printable(sentence))
    return paths | write(title, page, out, style)
