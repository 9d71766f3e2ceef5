"""No module has a way to run what somebody else has written: no unpickling, no eval, no loading
scripts.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = [
    path
    for package in ("diloco", "inner", "outer")
    for path in sorted((ROOT / package).rglob("*.py"))
]
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
UNPICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN = {
    "eval", "exec", "__import__", "importlib.import_module",
    "torch.load", "np.load", "numpy.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load",
    "dcp.FileSystemReader", "FileSystemReader",
}  # fmt: skip
READS_TENSORS = "inner/checkpoint/tensor_reader.py"
# The second one has a subclass of yaml.SafeLoader. The third one imports own code, which the
# operator's config or command line names; that what others name is refused is tested in
# tests/diloco/config/test_from_swarm.py. The last one imports modules of the installed torchtitan,
# by their own list.
ALLOWED = {
    READS_TENSORS: {"torch.load"},
    "inner/foreign/text.py": {"yaml.load"},
    "inner/import_path.py": {"importlib.import_module"},
    "diloco/titan/config_registry.py": {"importlib.import_module"},
}


def names_of(path: Path) -> tuple[set[str], list[ast.Call]]:
    """The modules that a module imports, and its calls."""
    nodes = list(ast.walk(TREES[path]))
    modules = {
        alias.name.split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {
        (node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }
    return modules, [node for node in nodes if isinstance(node, ast.Call)]


def test_no_module_calls_anything_that_runs_what_it_reads() -> None:
    assert {
        str(path.relative_to(ROOT)): found for path in MODULES if (found := dangers_of(path))
    } == {}


def dangers_of(path: Path) -> set[str]:
    """The unpicklers, calls and options in a module by which a file or a peer could run code."""
    modules, calls = names_of(path)
    used = {ast.unparse(call.func) for call in calls} & FORBIDDEN
    options = {keyword.arg for call in calls for keyword in call.keywords} & {
        "allow_pickle",
        "trust_remote_code",
    }
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    return (modules & UNPICKLERS) | (used - allowed) | {str(option) for option in options}


def test_the_one_torch_load_builds_tensors_only() -> None:
    (call,) = (
        call for call in names_of(ROOT / READS_TENSORS)[1] if ast.unparse(call.func) == "torch.load"
    )
    assert "weights_only=True" in {ast.unparse(keyword) for keyword in call.keywords}
