"""The floors of the house: who may import whom, and what a newcomer may count on."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {"inner": {"inner"}, "outer": {"outer"}, "diloco": {"diloco", "inner", "outer"}}
FLOORS = {
    "inner": """
        errors expert_names threads
        files foreign param_spec
        import_path
        config
        data.chat mesh params
        data.sources
        data.vocabulary
        data.token_files
        data
        data.streaming
        model
        flops huggingface optim.muon parallel.context parallel.weights
        optim parallel.pipeline
        checkpoint parallel
        measure trainer
        measure.traffic
        dry_run
    """,
    "outer": """
        config errors hooks limits threads
        own_code
        codecs.packing identity packages space
        merges network
        codecs diagnostics leases routes transports transports.gloo
        transports.tls
        agreement.proofs membership report
        membership.dht
        agreement connect
        agreement.running audits
        reduce
        state
        transfer
        rounds
        cost gossip
        loop
    """,
    "diloco": """
        errors testing watchdog
        config faults formatting
        network_emulation planning.laws planning.mesh records runtime.devices
        overview planning
        alerts report runtime
        checkpoints connections swarm
        doctor
        status tuning
        island_rounds participation watch.collection watch.view
        assemble
        island_records own_loop.model
        island_duties
        island
        own_loop
        trainers
        simulate titan virtual
        experiments.definition launch_files rehearsal train watch
        experiments.results
        experiments
        cli
        __main__
    """,
}
"""A line is a floor, the lowest one first. A folder, or a file at the top of a package, imports
lower floors only.
"""
HIVEMIND_HOMES = ("outer/transports/hivemind", "outer/membership/")
NAMED_FILE = re.compile(r"(?<![\w/.'-])([\w/]+\.py)\b")
MAX_LINES = 400
MAX_FUNCTION_LINES = 66
MOST_FILES = 10
MOST_FILES_AT_THE_TOP = 10
LARGER = {
    "inner/huggingface": "the parts of a folder, and what its config.json says of each part of a "
    "model",
    "inner/model": "the decoder: its sizes and parameters, its modules, what they compute with",
    "diloco/planning/mesh": "what a mesh costs: one file for each figure and picture of it",
    "diloco/config": "a config: its parts, how it is read, checked and explained, one file each",
    "diloco/runtime": "one file for each thing that a rank does beside its inner steps",
    "inner/optim": "optimizers, one file each, and what a step does with gradients and learning "
    "rate",
    "inner/data/sources": "one file for each kind of source, beside what they share",
    "outer/network": "both ends of a connection, what passes over it, and who is let in",
    "outer/merges": "a family: one file for each rule",
    "inner/trainer.py": "the inner step and what it is made of, with every call in its order",
    "inner/model/block_params.py": "the one list of a block's parameters, of every kind of block",
    "outer/loop.py": "the outer loop, with every call that an island makes, in their order",
    "outer/agreement/messages.py": "all messages of the agreement, one after the other",
}
"""Folders and files that are larger, and why: a home is not bent for a number."""
LONGER = {
    "diloco.cli.main.plan": "a line for each option",
    "diloco.cli.simulate.simulate": "a line for each option, and the text of --fault",
    "diloco.cli.swarm.watch": "a line for each option",
    "diloco.cli.weights.evaluate": "a line for each option",
    "outer.rounds.agreed.build_agreed_averager": "each part is built once, in order",
}
"""Functions that are longer, and why."""


def modules() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Of a folder either something of its __init__ is imported or one of its modules.
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                name if (ROOT / name.replace(".", "/")).with_suffix(".py").exists() else node.module
                for name in full
            }
    return names


# At once, before tests start threads: Python 3.11's parser fails when another thread parses at the
# same time.
TREES = {path: ast.parse(path.read_text()) for path in modules()}
IMPORTED = {path: imported(tree) for path, tree in TREES.items()}


FLOOR_OF = {
    f"{package}.{room}": floor
    for package, table in FLOORS.items()
    for floor, rooms in enumerate(table.strip().splitlines())
    for room in rooms.split()
}
PACKAGES = {
    ".".join(path.relative_to(ROOT).parent.parts)
    for path in modules()
    if path.name == "__init__.py"
}


def room_of(module: str) -> str:
    """The folder of a module; of one at the top of a package the module itself."""
    names = module.split(".")
    is_folder = module in PACKAGES and len(names) > 1
    return module if is_folder or len(names) <= 2 else ".".join(names[:-1])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def files_by_folder() -> dict[Path, list[Path]]:
    folders: dict[Path, list[Path]] = {}
    for path in modules():
        if path.name not in ("__init__.py", "__main__.py"):
            folders.setdefault(path.parent, []).append(path)
    return folders


def test_a_folder_imports_lower_floors_only():
    assert {module_of(path): found for path in modules() if (found := rooms_not_below(path))} == {}


def rooms_not_below(path: Path) -> list[str]:
    """The rooms of its package that a module imports although they are not on lower floors."""
    here = room_of(module_of(path))
    rooms = {room_of(name) for name in IMPORTED[path] if name.split(".")[0] == here.split(".")[0]}
    others = {room for room in rooms if room not in (here, here.split(".")[0])}
    if here == "diloco":  # the door to diloco.Islands imports it when it is asked for
        return sorted(others - {"diloco.own_loop"})
    return sorted(
        room for room in others if here not in FLOOR_OF or FLOOR_OF[room] >= FLOOR_OF[here]
    )


def test_the_program_uses_only_the_surface_of_outer_that_its_docstring_lists():
    # A folder whose __init__.py has content is imported by its own name.
    files = [
        path
        for path in modules()
        if path.is_relative_to(ROOT / "outer") and path != ROOT / "outer" / "__init__.py"
        if path.name != "__init__.py" or path.read_text().strip()
    ]
    modules_of_outer = {module_of(path).removeprefix("outer.") for path in files}
    listed = set(
        re.findall(
            r"[a-z_.]*[a-z_]", ast.get_docstring(TREES[ROOT / "outer" / "__init__.py"]) or ""
        )
    )
    program = [names for path, names in IMPORTED.items() if path.is_relative_to(ROOT / "diloco")]
    used = {
        name.removeprefix("outer.")
        for names in program
        for name in names
        if name.startswith("outer.")
    }
    assert used == listed & modules_of_outer


def test_every_folder_has_its_floor():
    rooms = {room_of(module_of(path)) for path in modules()} - set(MAY_IMPORT)
    assert rooms == set(FLOOR_OF)


def test_a_folder_has_so_few_files_that_one_look_is_enough():
    sizes = {
        str(folder.relative_to(ROOT)): len(files) for folder, files in files_by_folder().items()
    }
    tops = {name for name in sizes if "/" not in name}
    unusual = {
        name
        for name, number in sizes.items()
        if not 3 <= number <= (MOST_FILES_AT_THE_TOP if name in tops else MOST_FILES)
    }
    assert unusual == {name for name in LARGER if not name.endswith(".py")}


def test_a_module_imports_its_own_floor_and_those_below_only():
    tops = {
        path: {name.split(".")[0] for name in IMPORTED[path]} & set(MAY_IMPORT)
        for path in modules()
    }
    assert [
        path for path, found in tops.items() if found - MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    ] == []


def test_hivemind_is_imported_in_its_own_files_only():
    users = [
        path for path in modules() if "hivemind" in {name.split(".")[0] for name in IMPORTED[path]}
    ]
    names = [str(path.relative_to(ROOT)) for path in users]
    assert [name for name in names if not name.startswith(HIVEMIND_HOMES)] == []


def test_a_file_is_short_enough_to_be_read_at_once():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert {name for name, number in lines.items() if number > MAX_LINES} == {
        n for n in LARGER if n.endswith(".py")
    }


def test_a_function_is_short_enough_to_be_read_at_once():
    assert {name for path in modules() for name, _ in lengths_of_functions(path)} == set(LONGER)


def lengths_of_functions(path: Path) -> Iterator[tuple[str, int]]:
    """The functions of a module that are too long, with their lines."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{module_of(path)}.{node.name}", lines


def test_files_that_docstrings_name_exist():
    tops = [*MAY_IMPORT, "tests", "scripts", "examples", "docs"]
    known = [f"/{path.relative_to(ROOT)}" for top in tops for path in (ROOT / top).rglob("*.py")]
    missing = [
        f"{module_of(path)}: {name}"
        for path in modules()
        for name in NAMED_FILE.findall(docstrings_of(path))
        if not any(each.endswith(f"/{name}") for each in known)
    ]
    assert missing == []


def docstrings_of(path: Path) -> str:
    """All docstrings of a module, one after the other."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return "\n".join(
        ast.get_docstring(node) or "" for node in ast.walk(TREES[path]) if isinstance(node, kinds)
    )


def test_each_assignment_has_a_line_of_its_own():
    """A swap is one assignment: its values are those from before."""
    found = {f"{module_of(path)}:{line}" for path in modules() for line in packed_assignments(path)}
    assert found == set()


def packed_assignments(path: Path) -> Iterator[int]:
    """The lines of `a, b = x, y` in which no value depends on a target."""
    for node in ast.walk(TREES[path]):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                texts = {
                    ast.unparse(each)
                    for value in values
                    for each in ast.walk(value)
                    if isinstance(each, ast.expr)
                }
                if not texts & {ast.unparse(target) for target in targets}:
                    yield node.lineno


@pytest.mark.parametrize(
    "module",
    [
        "diloco.cli.main",
        "diloco.config.schema",
        "inner.config",
        "outer.config",
        "diloco.config.check",
        "outer.routes.relay",
    ],
)
def test_the_command_line_configs_and_relays_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'hivemind' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=180).returncode == 0
