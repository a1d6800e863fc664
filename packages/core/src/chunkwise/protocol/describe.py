"""A declaration in words, for the command line and the generated docs."""

from __future__ import annotations

from chunkwise.protocol.axes import tensor_spec
from chunkwise.protocol.declaration import Declaration


def arguments(declaration: Declaration) -> list[str]:
    """Each argument as it is written in a call: ``q [B T H K]``, ``initial_state=None [N HV K V]``, ``scale=None``."""
    shown = []
    for name, parameter in declaration.signature.parameters.items():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        tensor = tensor_spec(name, parameter.annotation)
        shown.append(f"{name}{default}" + (f" [{tensor.axes_text}]" if tensor else ""))
    return shown


def outputs(declaration: Declaration) -> list[str]:
    """Each output: ``o [B T HV V]``, ``final_state [N HV K V] if output_final_state``."""
    return [
        f"{output.name} [{output.axes_text}]" + (f" if {output.when}" if output.when else "")
        for output in declaration.promises.outputs
    ]


def residual_formats(declaration: Declaration) -> list[str]:
    """Each residual format with its policy: ``gdn-wy64@2 (lean)``."""
    return [f"{residual.name} ({residual.policy})" for residual in declaration.promises.formats]


def one_line(declaration: Declaration) -> str:
    """The whole op in one line."""
    return (
        f"{declaration.name}({', '.join(arguments(declaration))}) -> {', '.join(outputs(declaration))}; "
        f"gradients: {' '.join(declaration.promises.differentiable)}; "
        f"residuals: {', '.join(residual_formats(declaration))}"
    )
