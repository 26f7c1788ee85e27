# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation's site, which Sphinx builds.

From the root of the repository::

    python -m sphinx -W -n -b html docs docs/_build/html

IPUFIT_REPOSITORY is the address of the repository, if pages are to lead to it.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]
os.environ.setdefault("IPUFIT_BACKEND", "emulator")  # and says nothing about it

from ipufit import __version__  # noqa: E402 - found by the path above

project = "ipufit"
author = "the authors of ipufit"
project_copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "outside",
    "keywords",
    "public_names",
]
# The second is for builds without a network: a line for each name that pages mention.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", (None, "torch.inv")),
}
intersphinx_timeout = 5
autosummary_generate = False
exclude_patterns = ["_build", "_extensions"]
nitpicky = True
# Types of others, whose documentation would have to be downloaded, and types that are
# no public names: aliases, type variables, private classes.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|nn|collections|typing|pathlib|enum|rich|logging)\b.*"),
    ("py:.*", r"(os|abc|json|datetime|optuna)\.\w+"),
    ("py:.*", r"[A-Z]?[a-z]+(\[.*)?"),  # built-in types
    ("py:.*", r"(.*\.)?(_\w+|T|\w+Like|SavedAt|Rates|Precision|Structure|Leaf)"),
    ("py:.*", r"(.*\.)?(ExecutionStrategy|Setter|StateTensor)"),
]

myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False  # "The loss: ..." begins with no type
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# A name in backticks is a link if the site has it, else code (see public_names.py).
default_role = "name"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["messages.js"]
html_title = f"ipufit {release}"
html_copy_source = False
html_show_sphinx = False
html_search_scorer = str(HERE / "_extensions" / "scorer.js")

# With the address of the repository each page has a link to edit it, and each entry of
# the reference one to its source.
REPOSITORY = os.environ.get("IPUFIT_REPOSITORY")
if REPOSITORY:
    extensions.append("sphinx.ext.linkcode")
    html_theme_options = {
        "source_repository": REPOSITORY,
        "source_branch": "main",
        "source_directory": "docs/",
    }


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of an entry's source lines."""
    value: object = sys.modules.get(info["module"])
    for name in info["fullname"].split("."):
        value = getattr(value, name, None)
    try:
        path = inspect.getsourcefile(inspect.unwrap(value))  # type: ignore[arg-type]
        lines, first = inspect.getsourcelines(value)  # type: ignore[arg-type]
    except (TypeError, OSError):  # data, and what is generated
        return None
    file = Path(path or "").relative_to(HERE.parent).as_posix()
    return f"{REPOSITORY}/blob/main/{file}#L{first}-L{first + len(lines) - 1}"
