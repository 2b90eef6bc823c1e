"""What a command line names: modules, files of their own, and files of a package."""

import sys

import pytest

from shmvec import ShmVectorEnv
from shmvec._named import find_env, find_policy

ENV = """
import gymnasium as gym

def make_env(**kwargs):
    return gym.make("CartPole-v1", max_episode_steps=length(), **kwargs)

def policy(observations, env_ids):
    return [length()] * len(observations)
"""


@pytest.fixture(autouse=True)
def as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def made_by(code):
    known = {}
    exec(code, known)  # as its user would
    return known["make_env"]()


PLACES = [
    ("here.py", "from beside_it import length", "beside_it.py"),
    ("below/here.py", "from beside_it import length", "below/beside_it.py"),
    ("a_package/here.py", "from .beside_it import length", "a_package/beside_it.py"),
    ("x/a_package/y/here.py", "from ..beside_it import length", "x/a_package/beside_it.py"),
    ("a_package/here.py", "from a_package.beside_it import length", "a_package/beside_it.py"),
    ("a_package/__init__.py", "from .beside_it import length", "a_package/beside_it.py"),
]


@pytest.mark.deep
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_files_with_others_beside_them(tmp_path, place, absolute):
    file, imports, beside = place
    write(tmp_path / file, imports + ENV)
    write(tmp_path / beside, "def length():\n    return 3\n")
    if "a_package" in file:
        for folder in (tmp_path / file, tmp_path / beside):
            folder = folder.parent
            if not (folder / "__init__.py").exists():
                write(folder / "__init__.py")
    where = str(tmp_path / file) if absolute else file
    assert find_policy(f"{where}:policy")([0, 0], None) == [3, 3]
    make, code = find_env(f"{where}:make_env", {"render_mode": None})
    envs = ShmVectorEnv([make], num_workers=1, context="fork" if absolute else "spawn")
    envs.reset()
    truncated = [bool(envs.step([n % 2])[3][0]) for n in range(3)]
    envs.close()
    assert truncated == [False, False, True]
    assert made_by(code).spec.max_episode_steps == 3


@pytest.mark.deep
def test_a_file_in_no_package_that_imports_as_if_it_were_in_one(tmp_path):
    write(tmp_path / "folder" / "here.py", "from .beside_it import length" + ENV)
    with pytest.raises(ValueError, match=r"folder/here.py .*relative.*__init__.py"):
        find_policy("folder/here.py:policy")


@pytest.mark.deep
def test_a_file_of_a_package_that_another_one_hides(tmp_path):
    write(tmp_path / "json" / "__init__.py")
    write(tmp_path / "json" / "here.py", ENV)
    with pytest.raises(ValueError, match="'json'"):
        find_policy("json/here.py:policy")


@pytest.mark.deep
def test_what_else_a_file_cannot_import_is_its_own_error(tmp_path):
    write(tmp_path / "here.py", "import no_module_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
        find_policy("here.py:policy")
    assert "here" not in sys.modules


def test_what_names_no_env_says_what_to_name(tmp_path):
    write(tmp_path / "here.py", "class Env:\n    def __init__(self, level):\n        pass")
    with pytest.raises(ValueError, match="'here.py' is a file: .* here.py:make_env"):
        find_env("here.py", {})
    with pytest.raises(ValueError, match=r"Env takes \(level\): give its arguments by --kwargs"):
        find_env("here.py:Env", {})
    assert find_env("here.py:Env", {"level": 1})[0]() is not None
