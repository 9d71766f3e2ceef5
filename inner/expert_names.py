"""Names of the matrices of a mixture's experts. No torch here.

The module has one tensor for all experts of a layer, and everything outside of it a matrix per
expert: initial weights, what islands average, fragments, and files. So an expert has the same name
on every mesh.

    layers.3.ffn.experts.up_proj.weight       in the module, (experts, rows, columns)
    layers.3.ffn.experts.17.up_proj.weight    the matrix of expert 17
"""

import re

ROUTER_BIAS = "ffn.router.bias"
"""Name in its layer of the bias that balances the experts of a router."""
_STACK = re.compile(r"(.*\bffn\.experts\.)((?:gate|up|down)_proj\.weight)")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\bffn\.experts\.)(\d+)\.((?:gate|up|down)_proj\.weight)")


def is_stacked(name: str, num_dims: int) -> bool:
    """Return whether a parameter of a module is the tensor of all experts."""
    return num_dims == 3 and _STACK.fullmatch(name) is not None


def expert_name(name: str, number: int) -> str:
    """Return the name of one expert's matrix, given that of the tensor of all experts."""
    found = _STACK.fullmatch(name)
    assert found is not None, f"{name} is not the tensor of all experts"
    return f"{found[1]}{number}.{found[2]}"


def find_expert(name: str) -> tuple[str, int] | None:
    """Return the name of the tensor of all experts and the number of the expert whose matrix has
    this name; None if it is another parameter's.
    """
    found = _EXPERT.fullmatch(name)
    return None if found is None else (f"{found[1]}{found[3]}", int(found[2]))


def expert_place(name: str) -> tuple[int, int] | None:
    """Return the layer and the number of the expert whose matrix has this name; None if it is
    another parameter's.

    >>> expert_place("layers.3.ffn.experts.17.up_proj.weight")
    (3, 17)
    """
    found = _EXPERT.fullmatch(name)
    layer = None if found is None else _LAYER.search(found[1])
    return None if found is None or layer is None else (int(layer[1]), int(found[2]))


def router_bias_name(layer: int) -> str:
    """Return the full name of the bias of a layer's router, which is a buffer and no parameter."""
    return f"layers.{layer}.{ROUTER_BIAS}"


def is_router_bias(name: str) -> bool:
    """Return whether a full name is that of the bias of a router."""
    return name.endswith(f".{ROUTER_BIAS}")
