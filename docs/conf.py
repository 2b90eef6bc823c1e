"""How Sphinx makes the site: ``python -m sphinx -W docs build/site``, with the extra ``docs``."""

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

import shmvec

DOCS = Path(__file__).parent
NOTEBOOKS = DOCS.parent / "examples" / "notebooks"

project = "shmvec"
author = "the shmvec authors"
version = release = shmvec.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the site shows the outputs that the notebooks hold

html_theme = "furo"
html_title = f"shmvec {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

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

# What `shmvec` has, where the reference has it.
codeautolink_inventory_map = {
    f"shmvec.{name}": f"{shmvec._MODULES.get(name, 'shmvec.faults')}.{name}"
    for name in shmvec.__all__
    if name not in ("__version__", "is_native")
}

# The page that a search finds first.
SEARCHED = {
    "aio": "asyncio, await, coroutine of the program, trio",
    "check": "check, same results",
    "cluster": "ray, nodes, Collector",
    "coming-from/sb3": "sb3, stable-baselines3, SubprocVecEnv",
    "debugging": "debug, breakpoint, traceback",
    "evaluation": "evaluate, seeds, episodes",
    "faults": "crash, restart, FaultPolicy, on_crash, on_error, on_timeout, step_timeout",
    "hangs": "hang, hangs, stuck, stacks, deadlock",
    "infos": "info, final_info, final_obs",
    "inside": "slow, stats, top, bottleneck",
    "partial-batches": "batch_size, partial batch, recv, send, async_reset, envpool",
    "performance": "benchmark, bench, speed, fps",
    "pipeline": "pipeline",
    "quickstart": "AsyncVectorEnv, tutorial",
    "replay": "replay buffer, dqn, sac",
    "rollouts": "rollout, ppo, gae, torch",
    "settings": "num_workers, caller_steps, pin_workers, tune, install(), wait_policy, threads",
    "starting": "context, spawn, fork, forkserver, __main__",
    "suites": "suite, tasks, resume",
    "waiting-envs": "overlap, spare_envs, async, coroutine",
}


def _at_home(app, name, source):
    """Rewrite what a page says for readers in the repository; add its words for the search."""
    source[0] = source[0].replace("](../CONTRIBUTING.md)", "](contributing.md)")
    source[0] = source[0].replace("](../examples/notebooks/", "](notebooks/")
    if name == "notebooks":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\nnotebooks/*\n```\n"
    if name in SEARCHED:
        first = SEARCHED[name].replace(", ", ", !")  # a main entry comes before all else
        index = f"\n\n```{{index}} !{first}\n```\n"
        source[0] = re.sub(r"\A(# .+)", lambda title: title[0] + index, source[0])


def _copy_notebooks(app, config):
    """Sphinx reads only what lies in docs."""
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        (DOCS / "notebooks").mkdir(exist_ok=True)
        shutil.copy2(notebook, DOCS / "notebooks")


def _pictures_for_both_pages(app, doctree):
    """Show picture-dark.png, if it exists, in place of picture.png on a dark page."""
    for image in list(doctree.findall(nodes.image)):
        path = Path(image["uri"])
        dark = path.with_name(f"{path.stem}-dark{path.suffix}")
        if (Path(doctree["source"]).parent / dark).exists():
            other = image.deepcopy()
            other["uri"] = str(dark)
            other["classes"].append("only-dark")
            image["classes"].append("only-light")
            image.parent.insert(image.parent.index(image) + 1, other)


def _documented(env):
    """The place of each class, method and function, by a name that nothing else has."""
    found, several = {}, set()
    for full, entry in env.get_domain("py").objects.items():
        name = re.search(r"(\b[A-Z]\w*\.)?\w+$", full)[0]  # Class.method, or what a module has
        plain = name.isalpha() and name.islower() and name not in shmvec.__all__
        theirs = "shmvec.adapters." in full  # named as the systems that they are for name them
        if not (plain or theirs or entry.aliased or entry.objtype == "module"):
            if found.setdefault(name, (entry.docname, entry.node_id, full))[0] != entry.docname:
                several.add(name)
    return {name: place for name, place in found.items() if name not in several}


class LinkNames(SphinxPostTransform):
    """Inline code that is a public name, such as `shmvec.Replay` or `envs.stats()`, is a link."""

    default_priority = 15  # when other references are links already
    variables = {"envs": "ShmVectorEnv", "pipeline": "Pipeline", "replay": "Replay"}

    def run(self):
        """Link the names of one page, but in headings and other links."""
        places, here = _documented(self.env), self.env.current_document.docname
        outer = [*self.document.findall(nodes.reference), *self.document.findall(nodes.title)]
        linked = {id(code) for node in outer for code in node.findall(nodes.literal)}
        for code in list(self.document.findall(nodes.literal)):
            name = re.fullmatch(r"(?:shmvec\.)?(\w+)((?:\.\w+)*)(\(.*\))?", code.astext())
            place = name and places.get(self.variables.get(name[1], name[1]) + name[2])
            if place and id(code) not in linked:
                page, anchor, full = place
                new = make_refnode(self.app.builder, here, page, anchor, code.deepcopy(), full)
                code.replace_self(new)


def _write_llms(app, exception):
    """llms.txt, for programs that read the site: what it is, and its pages by their titles."""
    if exception or app.builder.format != "html":
        return
    index = app.env.get_doctree("index")
    lines = [f"# {project}", "", f"> {next(index.findall(nodes.paragraph)).astext()}"]
    for tree in index.findall(addnodes.toctree):
        lines += ["", f"## {tree['caption']}", ""]
        for page in tree["includefiles"]:
            title = app.env.titles[page].astext()
            lines.append(f"- [{title}]({app.builder.get_target_uri(page)})")
    text = "\n".join(line.replace("\n", " ") for line in lines)
    Path(app.outdir, "llms.txt").write_text(f"{text}\n", "utf-8")


def _uninstall(app, env):
    """Undo what importing shmvec.auto for its page has done: AsyncVectorEnv is Gymnasium's."""
    shmvec.uninstall()


def setup(app):
    """Sphinx calls this."""
    app.connect("env-updated", _uninstall, priority=100)  # before names in code are looked up
    app.connect("config-inited", _copy_notebooks)
    app.connect("source-read", _at_home)
    app.connect("build-finished", _write_llms)
    app.connect("doctree-read", _pictures_for_both_pages, priority=400)  # before they are copied
    app.add_post_transform(LinkNames)
