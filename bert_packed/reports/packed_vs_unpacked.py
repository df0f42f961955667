"""How much faster packed data trains: both programs measured on this machine, in this run."""

import statistics
import time


def compare(steps, num_repeats=5):
    """Measure training steps on packed and unpacked batches of equal shape, in turns.

    Args:
        steps: Dict from "unpacked" and "packed" to a pair (function that takes one step on a batch and
            returns its sums, list of batches). Both take batches of the same number of packs and tokens.
        num_repeats: Timed steps each, after one step that compiles.

    Returns:
        List of two dicts for a table: `data`, `seconds_per_step` (median), `sequences_per_step` (mean of
        the batches timed), `sequences_per_second`, `tokens_per_second` (padding not counted), `speed_up`.
    """
    timed = {name: [] for name in steps}
    for name, (step, batches) in steps.items():
        _timed_step(step, batches[0])  # compile
        timed[name] = []
    for repeat in range(num_repeats):
        for name, (step, batches) in steps.items():  # in turns, so that a slow minute hits both
            timed[name].append(_timed_step(step, batches[repeat % len(batches)]))
    rows = []
    for name, measured in timed.items():
        seconds = statistics.median(second for second, _ in measured)
        num_sequences = statistics.mean(sums["num_sequences"] for _, sums in measured)
        num_tokens = statistics.mean(sums["num_tokens"] for _, sums in measured)
        rows.append(
            {
                "data": name,
                "seconds_per_step": seconds,
                "sequences_per_step": num_sequences,
                "sequences_per_second": num_sequences / seconds,
                "tokens_per_second": num_tokens / seconds,
            }
        )
    baseline = rows[0]["sequences_per_second"]
    return [{**row, "speed_up": row["sequences_per_second"] / baseline} for row in rows]


def _timed_step(step, batch):
    start = time.perf_counter()
    sums = {name: float(value) for name, value in step(batch).items()}
    return time.perf_counter() - start, sums
