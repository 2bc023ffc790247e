"""Run the example tasks with lm-eval in each of its request modes, and print the results.

    python tests/clients/run_lm_eval.py http://127.0.0.1:8000/v1/completions

Four modes cover every pair of settings; `LATIMER_FULL=1` runs all eight.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
TASKS = Path(__file__).parent.parent.parent / "examples" / "evaluate"


def ways() -> list[tuple[bool, int, int]]:
    """Return modes: True for requests of ids, concurrent requests, and texts per request."""
    found = list(itertools.product((True, False), (1, 8), (1, 4)))
    if os.environ.get("LATIMER_FULL"):
        return found
    return [way for way in found if (way[0] + (way[1] > 1) + (way[2] > 1)) % 2]


def main(url: str) -> None:
    """Print one line of JSON for each mode."""
    os.chdir(TASKS)
    import lm_eval
    from lm_eval.tasks import TaskManager

    logging.disable(logging.WARNING)
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    for tokenized, concurrent, batch in ways():
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": url,
                "model": "demo",
                "tokenizer_backend": "remote",
                "tokenized_requests": tokenized,
                "num_concurrent": concurrent,
                "max_retries": 1,
            },
            batch_size=batch,
            tasks=["demo_choice", "demo_rolling", "demo_generate"],
            task_manager=tasks,
            log_samples=True,
            # Standard errors are not used, and each one costs 100,000 samples.
            bootstrap_iters=0,
        )
        assert result is not None
        choices = sorted(result["samples"]["demo_choice"], key=lambda sample: sample["doc_id"])
        line = {
            "way": [tokenized, concurrent, batch],
            "bits_per_byte": result["results"]["demo_rolling"]["bits_per_byte,none"],
            "exact_match": result["results"]["demo_generate"]["exact_match,none"],
            "acc": result["results"]["demo_choice"]["acc,none"],
            "loglikelihoods": [
                [float(reply[0]) for reply in sample["filtered_resps"]] for sample in choices
            ],
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
