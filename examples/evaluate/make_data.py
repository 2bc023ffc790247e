"""Write small tasks in the demo model's language for lm-eval.

    python examples/evaluate/make_data.py

The tasks ask for sums, capitals and opposites: as multiple choice, as free answers, and as whole
lines to score.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
CAPITALS = {
    "France": "Paris",
    "Portugal": "Lisbon",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Egypt": "Cairo",
    "Norway": "Oslo",
}
OPPOSITES = {"hot": "cold", "light": "dark", "big": "small", "fast": "slow", "old": "new"}


def prompt(question: str) -> str:
    """Return a question in the model's own chat template."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def question(rng: random.Random) -> tuple[str, str, list[str]]:
    """Return a question, its answer, and three wrong answers."""
    if rng.random() < 0.4:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        wrong = rng.sample([n for n in range(19) if n != a + b], 3)
        answers = [f"{a} + {b} = {n}" for n in (a + b, *wrong)]
        return f"What is {a} plus {b}?", answers[0], answers[1:]
    table, text, answer = rng.choice(
        [
            (CAPITALS, "What is the capital of {}?", "The capital of {} is {}."),
            (OPPOSITES, "What is the opposite of {}?", "The opposite of {} is {}."),
        ]
    )
    key = rng.choice(list(table))
    others = rng.sample([value for name, value in table.items() if name != key], 3)
    answers = [answer.format(key, value) for value in (table[key], *others)]
    return text.format(key), answers[0], answers[1:]


def main() -> None:
    """Write the file that the tasks read."""
    rng = random.Random(7)  # noqa: S311
    rows = []
    for _ in range(40):
        text, right, wrong = question(rng)
        choices = [right, *wrong]
        rng.shuffle(choices)
        rows.append(
            {
                "prompt": prompt(text),
                "choices": choices,
                "answer": choices.index(right),
                "right": right,
                "line": f"{prompt(text)}{right}<|im_end|>\n",
            }
        )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (HERE / "questions.jsonl").write_text(lines)
    print(f"{len(rows)} questions in {HERE / 'questions.jsonl'}")


if __name__ == "__main__":
    main()
