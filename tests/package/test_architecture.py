# SPDX-License-Identifier: Apache-2.0
"""Imports only go down and make no circle: read from source.

Every import counts, wherever it stands: at the top, in a function, under
`TYPE_CHECKING`, in the stub of a package, or as `importlib.import_module`.
"""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = "ipufit"
SEAM = "ipufit._poptorch"
EMULATOR = "ipufit.emulator"
ENGINE = "ipufit.engine"
ROOT = Path(__file__).parents[2]

# Package -> its floors, the lowest first: the modules and packages on each, "" for its
# own `__init__`. A module imports its own package and lower floors only.
FLOORS = {
    PACKAGE: [
        "_hints",
        "errors types",
        "_arguments",
        "_env _files _kinds _lazy _modules _signals _torchrun _tree _version emulator",
        "_plots _poptorch batching",
        "distributed",
        "config doctor metrics mixing optimizers planning state",
        "placement",
        "checkpoint data losses",  # some losses are means of what metrics compute
        "callbacks",
        "engine",
        "resume",
        "model",
        "integrations",
        "",
        "cli",
        "__main__",
    ],
    ENGINE: [
        "weights",
        "precision trace_checks",
        "objective",
        "constants metric_state",
        "step",
        "host_calls",
        "program",
        "rows stopping",
        "loop",
        "",
    ],
    EMULATOR: [
        # What `import libpvti` and `import popart` find: nothing that runs.
        "_logging _popart core enums errors profiling _files",
        "_options_keys _switches _utils core.graph testing",
        "_install _processes core.float16 core.refusals optim options",
        # What `import popdist` finds, and what other processes find as PopTorch.
        "_args_parser _popdist _shim core.autograd_grad core.channels_last"
        " core.operators core.optimizer_rules",
        "core.recording core.rules core.strict",
        "_impl _printing _searches core.layout core.pod core.slices",
        "_dataloader core.device_optimizer ops poptorch_core",
        "_torch_ops core.composed",
        "core.tracer",
        "core.losses core.program",
        "core.pipelines",
        "core.compile",
        "core.anchors",
        "core.device",
        "core.fold",
        "_poplar_executor",
        "core.survey",
        "",
        "__main__",
    ],
}
FLOOR_OF = {
    package: {
        name: number for number, names in enumerate(floors) for name in names.split(" ")
    }
    for package, floors in FLOORS.items()
}
# What the package needs; `poptorch` has a rule of its own. Nothing here may become
# torchvision: the core is pure torch, and examples bring their own data.
THIRD_PARTY = {"numpy", "poptorch", "rich", "safetensors", "torch"}


# Looked for where a user may have it, and done without.
OPTIONAL = {"IPython", "datasets", "popdist", "poptorch_geometric"}
# Modules that import by names which are computed -> what these are.
COMPUTED_IMPORTS = {
    "ipufit._lazy": "public names, and packages that only some functions need",
    "ipufit.cli": "the user's module that a command line names",
    "ipufit.emulator": "public names, when they are first used",
    "ipufit.emulator._install": "the emulator under PopTorch's name",
}


def module_files():
    """Name -> file of every module of `ipufit`."""
    files = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        *parents, last = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parents if last == "__init__" else [*parents, last])] = path
    return files


MODULES = module_files()


def read(name, path):
    """What a module imports, and whether it imports something by a computed name."""
    files = [path for path in (path, path.with_suffix(".pyi")) if path.exists()]
    sources = [path.read_text(encoding="utf-8") for path in files]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    is_package = path.name == "__init__.py"
    return imports(name, nodes, is_package=is_package), by_computed_name(nodes)


def imports(name, nodes, *, is_package):
    """Absolute names of the modules that a module imports, at any depth of its code."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = node.module or ""
            if node.level:
                up = node.level - is_package
                base = name.split(".")[: len(name.split(".")) - up]
                parent = ".".join([*base, parent] if parent else base)
            for alias in node.names:
                submodule = f"{parent}.{alias.name}"
                found.add(submodule if submodule in MODULES else parent)
        elif is_import_by_name(node):
            [target, *_] = node.args
            if isinstance(target, ast.Constant):
                found.add(target.value)
    return found


def is_import_by_name(node):
    return isinstance(node, ast.Call) and "import_module" in {
        getattr(node.func, "id", None),
        getattr(node.func, "attr", None),
    }


def by_computed_name(nodes):
    """Whether a module imports something whose name its source doesn't tell."""
    return any(
        is_import_by_name(node) and not isinstance(node.args[0], ast.Constant)
        for node in nodes
    )


def circles(graph):
    """The modules of circles, and those on the way from one circle to another.

    Modules that import none of the others go, and so do those that none imports, until
    all that are left import one another.

    Args:
        graph: Module -> the modules that it imports.
    """
    left = {name: targets & set(graph) for name, targets in graph.items()}
    while True:
        imported = set().union(*left.values())
        stay = {name for name, targets in left.items() if targets and name in imported}
        if len(stay) == len(left):
            return sorted(left)
        left = {name: left[name] & stay for name in stay}


def is_inside(name, package):
    return name == package or name.startswith(package + ".")


def home(name, package=PACKAGE):
    """The module or package on a floor of `package` that a module belongs to."""
    inner, floors = name[len(package) + 1 :], FLOOR_OF[package]
    while inner not in floors and "." in inner:
        inner = inner.rpartition(".")[0]
    return inner


def goes_up(importer, imported, package=PACKAGE):
    """Whether an import inside a package breaks the rule of its floors."""
    here, there = home(importer, package), home(imported, package)
    floors = FLOOR_OF[package]
    return here != there and floors[there] >= floors[here]


READ = {name: read(name, path) for name, path in MODULES.items()}
IMPORTS = {name: found for name, (found, _) in READ.items()}
PAIRS = [(name, target) for name, targets in IMPORTS.items() for target in targets]


@pytest.mark.parametrize("package", FLOORS)
def test_every_module_has_a_floor(package):
    homes = {home(name, package) for name in MODULES if is_inside(name, package)}
    assert homes == set(FLOOR_OF[package])


@pytest.mark.parametrize("package", FLOORS)
def test_imports_only_go_down(package):
    inside = [
        pair
        for pair in PAIRS
        if is_inside(pair[0], package) and is_inside(pair[1], package)
    ]
    assert inside
    assert [pair for pair in inside if goes_up(*pair, package)] == []


def test_no_imports_make_a_circle():
    assert circles(IMPORTS) == []


def test_only_doors_import_by_a_computed_name():
    found = {name for name, (_, is_computed) in READ.items() if is_computed}
    assert found == set(COMPUTED_IMPORTS)


def test_only_the_seam_imports_poptorch():
    assert {name for name, target in PAIRS if is_inside(target, "poptorch")} == {SEAM}


def test_only_the_seam_chooses_the_emulator():
    outside = [pair for pair in PAIRS if not is_inside(pair[0], EMULATOR)]
    choosing = {name for name, target in outside if is_inside(target, EMULATOR)}
    assert choosing == {SEAM, PACKAGE}  # whose stub lists it


def test_the_emulator_imports_nothing_from_the_rest_of_ipufit():
    own = [pair for pair in PAIRS if is_inside(pair[0], EMULATOR)]
    strangers = [
        (name, target)
        for name, target in own
        if is_inside(target, PACKAGE) and not is_inside(target, EMULATOR)
    ]
    assert own
    assert strangers == []


@pytest.mark.skipif(
    sys.version_info < (3, 10), reason="3.10 is the first to list its standard library"
)
def test_the_package_imports_what_it_declares_and_the_emulator_torch_and_numpy():
    foreign = {
        (name, target.partition(".")[0])
        for name, target in PAIRS
        if target.partition(".")[0]
        not in {PACKAGE, *OPTIONAL, *sys.stdlib_module_names}
    }
    undeclared = {pair for pair in foreign if pair[1] not in THIRD_PARTY}
    emulator = {top for name, top in foreign if is_inside(name, EMULATOR)}
    assert undeclared == set()
    assert emulator <= {"numpy", "torch"}
    assert "torch" in emulator
