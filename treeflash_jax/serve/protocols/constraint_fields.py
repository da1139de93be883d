"""Fields of requests that constrain the answer, as OpenAI, vLLM, llama.cpp and SGLang name them."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from treeflash_jax.core.checks import expect

FAIL_FAST = Field(fail_fast=True)  # stops at the first error, since a million of them take minutes
ANY_OBJECT = '{"type": "object"}'
# Fields of other servers that would change an answer. guided_decoding_backend would not, and is accepted.
OTHER_CONSTRAINTS = re.compile("grammar|ebnf|guided_(?!decoding_backend).*|structured_.*")


class ResponseFormat(BaseModel):
    """Form of the answer: "text", "json_object", "json_schema" with the schema, or "structural_tag" with its format."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None

    def constraint(self) -> tuple[str, Any]:
        """Returns the constraint's name and value; None as value for no constraint. Raises ValueError if it is missing."""
        if self.type == "text":
            return "schema", None
        if self.type == "json_object":
            return "schema", ANY_OBJECT
        if self.type == "structural_tag":
            expect(self.format is not None, "response_format.format", self.format, "a structural tag")
            return "structural_tag", self.format
        schema = (self.json_schema or {}).get("schema")
        expect(isinstance(schema, dict), "response_format.json_schema.schema", schema, "a JSON schema")
        return "schema", schema


class StructuredOutputs(BaseModel, extra="allow"):
    """Constraint of the answer, with vLLM's names. At most one field is given."""

    schema_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], FAIL_FAST] | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class ConstraintFields(BaseModel, extra="allow"):
    """All fields that constrain the answer. A request has at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], FAIL_FAST] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None

    def constraints(self) -> dict[str, tuple[str, Any]]:
        """Returns the name (in this library) and the value of each given constraint, by the field that it was sent in.

        Raises ValueError for a missing schema.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        fields = {
            "response_format": (self.response_format or ResponseFormat(type="text")).constraint(),
            "structured_outputs.json": ("schema", outputs.schema_),
            "structured_outputs.json_object": ("schema", ANY_OBJECT if outputs.json_object else None),
            "structured_outputs.regex": ("pattern", outputs.regex),
            "structured_outputs.choice": ("choices", outputs.choice),
            "structured_outputs.structural_tag": ("structural_tag", outputs.structural_tag),
            "guided_json": ("schema", self.guided_json),
            "guided_regex": ("pattern", self.guided_regex),
            "guided_choice": ("choices", self.guided_choice),
            "json_schema": ("schema", self.json_schema),
            "regex": ("pattern", self.regex),
        }
        return {field: (name, value) for field, (name, value) in fields.items() if value is not None}

    def constraint(self) -> dict[str, Any]:
        """Returns the constraint of the answer, by its name in this library.

        Raises ValueError for several constraints, and for unsupported fields.
        """
        outputs = self.structured_outputs or StructuredOutputs()
        unsupported = {f"structured_outputs.{name}": value for name, value in outputs.model_extra.items()}
        unsupported |= {name: value for name, value in self.model_extra.items() if OTHER_CONSTRAINTS.fullmatch(name)}
        for name, value in unsupported.items():
            expect(value is None, name, value, "none: answers follow a JSON schema, a regular expression or choices")
        constraints = self.constraints()
        values = [value for _, value in constraints.values()]
        expect(len(constraints) < 2, " and ".join(constraints), values, "one of them")
        return {name: value if isinstance(value, str | list) else json.dumps(value) for name, value in constraints.values()}
