"""How Sphinx builds the site: ``make docs``. It needs no network, then or when it is read.

Formulas are MathML, which browsers draw themselves; the pictures and the chart are made here, by the ops and from the
measurements that they show.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import commands  # noqa: E402
import gallery  # noqa: E402
import latex2mathml.converter  # noqa: E402
import speed  # noqa: E402

import pixfuse  # noqa: E402

project = "pixfuse"
author = "the authors of pixfuse"
copyright = "2026, the authors of pixfuse"
version = release = pixfuse.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_static"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the signatures have them
autodoc_member_order = "bysource"
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"torch\..*|nn\..*|Tensor|optional|Module")]
html_theme = "furo"
html_title = f"pixfuse {version}"
html_static_path = ["_static"]
html_css_files = ["pixfuse.css"]
html_math_renderer = "mathml"
html_copy_source = False
pygments_style, pygments_dark_style = "tango", "monokai"


def inline_math(translator, node):
    """A formula in running text."""
    translator.body.append(latex2mathml.converter.convert(node.astext()))
    raise_skip()


def block_math(translator, node):
    """A formula on a line of its own."""
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    translator.body.append(f'<div class="math">{formula}</div>\n')
    raise_skip()


def raise_skip():
    """The node is done."""
    from docutils.nodes import SkipNode

    raise SkipNode


def make_pictures(app):
    """Everything that the pages show and is not kept in the repository."""
    folder = HERE / "_static" / "made"
    folder.mkdir(parents=True, exist_ok=True)
    commands.make(folder / "commands.md")
    gallery.make(folder)
    speed.make(HERE / "measurements" / "cpu.md", folder / "cpu.svg")


def setup(app):
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("builder-inited", make_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
