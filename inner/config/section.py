"""The base of all sections of a config."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the config's sections. They are frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
