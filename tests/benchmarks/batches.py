"""Compare a batch of generated tokens and a prompt with one batch for each, or with two halves.

    python tests/benchmarks/batches.py [--model 110m|demo|FILE] [--prompt 100]
        [--sequences 1 2 4 8 16 32] [--cells 64 250 1000] [--threads 2] [--repeats 5]

Some sequences, each with some cells, get their next token, and another sequence the prompt. A row
has the medians of milliseconds of `llama_decode`; both ways take turns. A ratio below 1 means that
batches of their own are faster. The last line has the cells from which Latimer makes them. With
`--prompt 0` there is none, and the two batches have half of the sequences each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.engine import model_of
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.tiles import least_cells

# Ids of tokens that every vocabulary has.
FIRST, IDS = 5, 500
BATCH = 512


class Sequences:
    """Some sequences with a number of cells, and another one for a prompt."""

    def __init__(self, context: Context, count: int, cells: int) -> None:
        self._context = context
        self._count = count
        self._positions = [cells] * count
        for sequence in range(count + 1):
            context.remove(sequence)
        for sequence in range(count):
            for start in range(0, cells, BATCH):
                self._add(sequence, start, min(BATCH, cells - start))
                context.decode()

    def decode(self, sequences: range, prompt: int) -> float:
        """Evaluate a batch; return its milliseconds.

        Args:
            sequences: those of which the next token is evaluated.
            prompt: the tokens of a prompt, which is removed again; 0 for none.
        """
        for sequence in sequences:
            self._add(sequence, self._positions[sequence], 1)
            self._positions[sequence] += 1
        if prompt:
            self._add(self._count, 0, prompt)
        begun = time.perf_counter()
        self._context.decode()
        took = time.perf_counter() - begun
        self._context.remove(self._count)
        return took * 1000

    def turn(self, prompt: int) -> tuple[float, float, float]:
        """Return the milliseconds of both in one batch, and of each in its own."""
        everything, half = range(self._count), self._count // 2
        if prompt:
            parts = self.decode(range(0), prompt), self.decode(everything, 0)
        else:
            parts = self.decode(everything[:half], 0), self.decode(everything[half:], 0)
        return self.decode(everything, prompt), *parts

    def _add(self, sequence: int, start: int, count: int) -> None:
        tokens = [FIRST + (sequence * 3 + at * 13) % IDS for at in range(start, start + count)]
        self._context.add(sequence, start, tokens, 1)


def main() -> None:
    """Print a row for each number of sequences and cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="110m", help="110m, demo, or a file")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens of the random model")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt; 0 for none")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--cells", type=int, nargs="+", default=[64, 250, 1000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    options = Options(parallel=max(given.sequences) + 1, batch=BATCH, threads=given.threads)
    length = max(given.sequences) * (max(given.cells) + 2 * given.repeats) + BATCH
    with tempfile.TemporaryDirectory() as folder:
        model = LoadedModel(model_of(given.model, folder, given.vocabulary), options)
        context = Context(model, options, length)
        parts = "prompt, tokens" if given.prompt else "halves"
        sys.stdout.write(f"| cells each | sequences | together | {parts} | ratio |\n")
        sys.stdout.write("|--:|--:|--:|--:|--:|\n")
        for cells in given.cells:
            for count in given.sequences:
                sequences = Sequences(context, count, cells)
                prompt = min(given.prompt, BATCH - count)
                turns = [sequences.turn(prompt) for _ in range(given.repeats)]
                both, first, second = map(statistics.median, zip(*turns, strict=True))
                sys.stdout.write(
                    f"| {cells} | {count} | {both:.1f} | {first:.1f}, {second:.1f} "
                    f"| {(first + second) / both:.2f} |\n"
                )
                sys.stdout.flush()
        sys.stdout.write(f"\n{least_cells(model, options):.0f} cells\n")
        context.close()
        model.close()


if __name__ == "__main__":
    main()
