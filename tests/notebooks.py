"""Runs a notebook of examples/notebooks, and stores its outputs, without what is this machine's.

    python tests/notebooks.py examples/notebooks/my_env_crashes.ipynb
    python tests/notebooks.py examples/notebooks/my_env_crashes.ipynb --set '{"STEPS": 30}'

The second line sets variables of the cell that is tagged "parameters", and stores nothing.
"""

import argparse
import ast
import json
import os
import tempfile
import time
from pathlib import Path

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
DEADLINE_S = 280


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def parameters(notebook):
    """The cell that sets what a test may set, and its variables."""
    for place, cell in enumerate(notebook["cells"]):
        if "parameters" in cell["metadata"].get("tags", ()):
            return place, {
                statement.targets[0].id: ast.literal_eval(statement.value)
                for statement in ast.parse(source(cell)).body
            }
    raise ValueError("no cell is tagged 'parameters'")


def executed(notebook, settings, folder):
    """The notebook with its outputs; what a cell raises is raised."""
    import nbclient
    import nbformat

    made = nbformat.reads(json.dumps(notebook), as_version=4)
    place, known = parameters(notebook)
    if unknown := settings.keys() - known.keys():
        raise ValueError(f"the notebook has no {sorted(unknown)}, but {sorted(known)}")
    if settings:
        lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
        made.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    at = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(made, timeout=DEADLINE_S, resources=at).execute()
    return made


def merged(outputs):
    """Outputs without what is of this run alone; what was written in pieces is one."""
    found = []
    for output in outputs:
        output = {key: value for key, value in output.items() if key != "transient"}
        if "metadata" in output:
            output["metadata"] = {}
        if "data" in output:
            output["data"] = {kind: lines(part) for kind, part in output["data"].items()}
        if "text" in output:
            if found and found[-1].get("name") == output["name"]:
                output["text"] = [*found.pop()["text"], *output["text"]]
            output["text"] = lines(output["text"])
        found.append(output)
    return found


def lines(text):
    return "".join(text).splitlines(keepends=True)


def cleaned(notebook):
    """What is stored: no times, no ids by chance, and of the metadata the kernel's name."""
    cells = []
    for place, cell in enumerate(notebook["cells"]):
        tags = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        kept = {"cell_type": cell["cell_type"], "id": f"cell-{place}", "metadata": tags}
        if cell["cell_type"] == "code":
            outputs = merged(cell["outputs"])
            kept |= {"execution_count": cell["execution_count"], "outputs": outputs}
        cells.append(kept | {"source": lines(cell["source"])})
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def write(path, notebook):
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--set", type=json.loads, default={}, help="variables, as JSON")
    options = parser.parse_args()
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or the kernel warns of frozen modules
    for path in options.notebooks:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            done = executed(read(path), options.set, folder)
        if not options.set:
            write(path, cleaned(done))
        print(f"{path.name}: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
