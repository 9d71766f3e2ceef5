"""Names, shapes and slices of a model's parameters, without their values. No torch here."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model, fp32."""

    name: str
    shape: tuple[int, ...]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the parameter as a matrix: (shape[0], product of the rest), or (1, 1)
        for a 0-d parameter.
        """
        return (self.shape[0] if self.shape else 1), math.prod(self.shape[1:])


@dataclass(frozen=True)
class ParamSlice:
    """The half-open rectangle rows x cols of a parameter that this rank holds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]
