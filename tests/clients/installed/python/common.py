"""Questions to the demo model, their answers, and a structured answer, for the clients' tests."""

from __future__ import annotations

from pydantic import BaseModel

ASK = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
JAPAN = "Q: What is the capital of Japan?\nA:"
TOM = "Give me JSON for Tom, age 33."
PARIS = "What is the weather in Paris?"
# The question of the model that thinks and calls a tool for two cities, and its last answer.
WEATHER = "What is the weather in Paris and Rome?"
FINAL = "It is 21 degrees in Paris and 18 in Rome."
DEGREES = {"Paris": "21", "Rome": "18"}
# A picture, as the base64 of a PNG.
DOT = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElF"
    "TkSuQmCC"
)


class Person(BaseModel):
    """A structured answer."""

    name: str
    age: int
