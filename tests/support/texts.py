"""Generated texts in the demo model's language: questions, answers, and unknown characters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

CAPITALS = {
    "France": "Paris", "Portugal": "Lisbon", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid",
    "Germany": "Berlin", "Egypt": "Cairo", "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "light": "dark", "big": "small", "fast": "slow", "old": "new", "wet": "dry",
}  # fmt: skip
WORDS = [
    "river",
    "stone",
    "cloud",
    "apple",
    "silver",
    "morning",
    "garden",
    "window",
    "summer",
    "winter",
]
STRANGE = (
    "😀", "🐱🔥", "漢字", "日本語のテキスト", "né", "über", "garçon", "Zoë 漢", "naïve café",
    "😀 é 漢",
    "Привет", "\u200b", "e\u0301", "🏳️‍🌈", "ﬁ",
)  # fmt: skip


def fragments(pieces: Sequence[bytes]) -> list[int]:
    """Return the ids of the tokens whose bytes are not whole characters."""
    return [at for at, piece in enumerate(pieces) if "\ufffd" in piece.decode(errors="replace")]


class Question(NamedTuple):
    """A question, its choices, and the index of the right one."""

    text: str
    choices: tuple[str, ...]
    answer: int


def questions(count: int, seed: int = 1) -> list[Question]:
    """Return questions with four choices each, worded like the demo model's answers."""
    rng = random.Random(seed)
    return [_question(rng) for _ in range(count)]


def _question(rng: random.Random) -> Question:
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        text, right = f"What is {a} plus {b}?", f"{a} + {b} = {a + b}"
        wrong = [f"{a} + {b} = {n}" for n in rng.sample(range(41), 4) if n != a + b]
    elif kind == 1:
        country = rng.choice(list(CAPITALS))
        text = f"What is the capital of {country}?"
        right = f"The capital of {country} is {CAPITALS[country]}."
        others = [city for city in CAPITALS.values() if city != CAPITALS[country]]
        wrong = [f"The capital of {country} is {city}." for city in rng.sample(others, 3)]
    else:
        word = rng.choice(list(OPPOSITES))
        text = f"What is the opposite of {word}?"
        right = f"The opposite of {word} is {OPPOSITES[word]}."
        others = [other for other in OPPOSITES.values() if other != OPPOSITES[word]]
        wrong = [f"The opposite of {word} is {other}." for other in rng.sample(others, 3)]
    choices = [right, *wrong[:3]]
    rng.shuffle(choices)
    return Question(text, tuple(choices), choices.index(right))


def chat(question: str, answer: str = "") -> str:
    """Return a turn in the demo model's template, with the beginning of its answer."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}"


def demo_texts(count: int, seed: int = 2) -> list[str]:
    """Return turns with right and wrong answers, words, and characters of several tokens."""
    rng = random.Random(seed)
    texts = []
    for number in range(count):
        question = _question(rng)
        words = " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
        strange = " ".join(rng.choices(STRANGE, k=rng.randint(1, 3)))
        shapes = (
            chat(question.text, rng.choice(question.choices)),
            chat(f"Say: {words}", words) + "<|im_end|>\n",
            chat(f"Say: {strange}", strange),
            f"{words} {strange} {question.text}",
            strange + words,
        )
        texts.append(shapes[number % len(shapes)])
    return texts
