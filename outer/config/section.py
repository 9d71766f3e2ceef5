"""The base of all sections of the outer config."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of the config's sections. They are immutable, and unknown keys are an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
