"""How Sphinx makes the site: ``python -m sphinx -W docs build/site``, with the extra ``docs``."""

import shmvec

project = "shmvec"
author = "the shmvec authors"
version = release = shmvec.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"shmvec {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": True}
# Systems that an adapter is for, where they are not installed.
autodoc_mock_imports = ["stable_baselines3", "tianshou", "ray"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes in the class's own description


def _at_home(app, name, source):
    """Pages link to CONTRIBUTING.md where it lies, for those who read them in the repository."""
    source[0] = source[0].replace("](../CONTRIBUTING.md)", "](contributing.md)")


def setup(app):
    """Sphinx calls this."""
    app.connect("source-read", _at_home)
